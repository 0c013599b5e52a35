"""`ppdsl doctor --device xla`: versions that fit, devices, environment variables, and what moves tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ppdsl.diagnostics import PpdslError
from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.testing import self_test

__all__ = ["checks"]

_BARRIER = "--xla_tpu_use_enhanced_launch_barrier"


def checks() -> Iterator[Check]:
    """Yield the checks; the first failure is the last when the others would only repeat it."""
    versions = _versions()
    yield versions
    if versions.status == Status.FAIL:
        return
    kind = os.environ.get("PJRT_DEVICE", "")
    if not kind:
        yield Check("PJRT_DEVICE", Status.FAIL, "not set", "set PJRT_DEVICE=TPU, or PJRT_DEVICE=CPU to try")
        return
    yield Check("PJRT_DEVICE", Status.OK, kind)
    if os.environ.get("XLA_USE_SPMD", "0") not in {"", "0"}:
        found = "set: the process shows one device"
        yield Check("XLA_USE_SPMD", Status.FAIL, found, "unset it; pp.xla.circular turns SPMD on itself")
        return
    try:
        count = adapter.device_count()
    except Exception as error:  # whatever the runtime or a driver says
        words = str(error).strip().partition("\n")[0] or type(error).__name__
        yield Check("devices", Status.FAIL, words, "look at PJRT_DEVICE, the driver, and who else holds the chips")
        return
    yield from _devices(kind, count)
    yield from _launching(kind)
    yield _host(count)
    if adapter.replica_count() != count:
        found = f"this process drives {count} of {adapter.replica_count()} devices, so collectives were not tested"
        yield Check("transport permute", Status.WARN, found, "pipelines inside this process use the host transport")
        return
    yield from _collectives()


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


def _devices(kind: str, count: int) -> Iterator[Check]:
    found = "xla:0" if count == 1 else f"xla:0 to xla:{count - 1}"
    if count == 1:
        remedy = "set CPU_NUM_DEVICES=4" if kind == "CPU" else "a pipeline needs one for each rank"
        yield Check("devices", Status.WARN, f"{found} only", remedy)
    else:
        yield Check("devices", Status.OK, found)
    if kind != "CPU":
        return
    told = os.environ.get("CPU_NUM_DEVICES")
    remedy = "" if told else "set it to the number of ranks"
    yield Check("CPU_NUM_DEVICES", Status.OK if told else Status.WARN, told or "not set", remedy)
    pool, cores = os.environ.get("XLA_THREAD_POOL_SIZE"), os.cpu_count() or 1
    threads = int(pool) if pool and pool.isdigit() else cores
    # A collective occupies a thread for each device until all have come.
    if threads < count:
        found = f"{pool}" if pool else f"not set, so {cores}, the number of cores"
        yield Check(
            "XLA_THREAD_POOL_SIZE", Status.FAIL, f"{found}: fewer than devices", f"set XLA_THREAD_POOL_SIZE={4 * count}"
        )
    else:
        yield Check("XLA_THREAD_POOL_SIZE", Status.OK, pool or f"not set, so {cores}, the number of cores")


def _launching(kind: str) -> Iterator[Check]:
    """Look whether programs of single devices may be launched.

    With the barrier a TPU waits until all devices of a program have been given it; a stage runs on one alone.
    """
    if kind != "TPU":
        return
    flags = [flag for flag in os.environ.get("LIBTPU_INIT_ARGS", "").split() if flag.startswith(_BARRIER)]
    if not flags:
        yield Check("LIBTPU_INIT_ARGS", Status.WARN, f"does not mention {_BARRIER}", f"add {_BARRIER}=false")
    elif flags[-1] == f"{_BARRIER}=false":
        yield Check("LIBTPU_INIT_ARGS", Status.OK, "the launch barrier is off")
    else:
        found = f"{flags[-1]}: a stage on one device would wait for the others"
        yield Check("LIBTPU_INIT_ARGS", Status.FAIL, found, f"add {_BARRIER}=false behind it")


def _host(count: int) -> Check:
    expected = torch.arange(6.0)
    for position in range(count):
        moved = expected.to(adapter.device_of(position)).to(adapter.device_of((position + 1) % count))
        if not torch.equal(adapter.host_copy(moved), expected):
            found = f"values from xla:{position} arrive changed"
            return Check("transport host", Status.FAIL, found, "report this with the versions above")
    return Check("transport host", Status.OK, "right from each device to the next")


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
