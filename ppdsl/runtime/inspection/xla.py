"""`ppdsl doctor --device xla`: versions that fit, devices, environment variables, and what moves tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ppdsl.diagnostics import PpdslError
from ppdsl.runtime.inspection import xla_environment as environment
from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.testing import self_test

__all__ = ["checks"]


def checks() -> Iterator[Check]:
    """Yield the checks; the first failure is the last when the others would only repeat it."""
    versions = _versions()
    yield versions
    if versions.status == Status.FAIL:
        return
    device = environment.pjrt_device(environment.tpu_chips())
    yield device
    if device.status == Status.FAIL:
        return
    kind = os.environ["PJRT_DEVICE"]
    stop = False
    for check in environment.before_devices(kind):
        yield check
        stop = stop or check.status == Status.FAIL
    if stop:
        return
    try:
        count = adapter.device_count()
    except Exception as error:  # whatever the runtime or a driver says
        yield Check("devices", Status.FAIL, _first_line(error), _no_devices(kind))
        return
    yield _devices(kind, count)
    threads = True
    if kind == "CPU":
        yield environment.cpu_devices()
        pool = environment.cpu_threads(count)
        threads = pool.status == Status.OK
        yield pool
    yield from environment.with_devices(kind)
    yield _host(count)
    yield from _together(count, threads=threads)


def _versions() -> Check:
    torch_version, xla_version = adapter.versions()
    if not xla_version:
        found = f"torch is {torch_version}, torch_xla is not installed"
        return Check("torch_xla", Status.FAIL, found, "pip install 'torch==2.9.*' 'torch_xla==2.9.*'")
    wanted = adapter.required_torch()
    if not torch_version.startswith(f"{wanted}."):
        found = f"torch_xla {xla_version} was built for torch {wanted}, and torch is {torch_version}"
        return Check("torch_xla", Status.FAIL, found, f"pip install 'torch=={wanted}.*' 'torch_xla=={wanted}.*'")
    return Check("torch_xla", Status.OK, f"{xla_version}, with torch {torch_version}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _no_devices(kind: str) -> str:
    if kind == "TPU":
        return "look whether another process holds the chips (tpu-info), and at PJRT_DEVICE and the TPU_ variables"
    return "set PJRT_DEVICE=TPU or PJRT_DEVICE=CPU"


def _devices(kind: str, count: int) -> Check:
    if count > 1:
        return Check("devices", Status.OK, f"xla:0 to xla:{count - 1}")
    remedy = "set CPU_NUM_DEVICES=4" if kind == "CPU" else "a pipeline needs one for each rank"
    return Check("devices", Status.WARN, "xla:0 only", remedy)


def _host(count: int) -> Check:
    expected = torch.arange(6.0)
    for position in range(count):
        moved = expected.to(adapter.device_of(position)).to(adapter.device_of((position + 1) % count))
        if not torch.equal(adapter.host_copy(moved), expected):
            found = f"values from xla:{position} arrive changed"
            return Check("transport host", Status.FAIL, found, "report this with the versions above")
    return Check("transport host", Status.OK, "right from each device to the next" if count > 1 else "right")


def _together(count: int, *, threads: bool) -> Iterator[Check]:
    """Look at what all devices do together, unless it is known that they cannot."""
    permute = "transport permute"
    if adapter.replica_count() != count:
        found = f"this process drives {count} of {adapter.replica_count()} devices, so collectives were not tested"
        yield Check(permute, Status.WARN, found, "pipelines inside this process use the host transport")
    elif count == 1:
        yield Check(permute, Status.OK, "there is one device, so nothing travels")
    elif not threads:
        found = "not tested: with fewer threads than devices it would hang, and collectives too"
        yield Check(permute, Status.WARN, found, "pipelines use the host transport until there are more threads")
    else:
        yield from _collectives()


def _collectives() -> Iterator[Check]:
    try:
        verdicts = self_test()
    except PpdslError as error:
        yield Check("collectives", Status.WARN, error.diagnostics[0].message, error.diagnostics[0].help or "")
        return
    permute = next(verdict for verdict in verdicts if verdict.collective == "collective_permute")
    if permute.passed:
        yield Check("transport permute", Status.OK, "right around all devices")
    else:
        remedy = "pipelines use the host transport meanwhile"
        yield Check("transport permute", Status.WARN, permute.reason, remedy)
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if not failed:
        yield Check("collectives", Status.OK, f"all {len(verdicts)} are right")
    elif len(failed) == len(verdicts):
        yield Check("collectives", Status.WARN, f"none works: {failed[0].reason}", "see the lines above")
    else:
        names = ", ".join(verdict.collective for verdict in failed)
        yield Check("collectives", Status.WARN, f"{names}: {failed[0].reason}", "the others are right")
