"""`ppdsl doctor --device cuda`: torch's CUDA, each device at work, the ways between them, and NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.units import counted, format_bytes

__all__ = ["checks"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")
_SLOW = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}


def checks() -> Iterator[Check]:
    """Yield the checks; the first failure is the last when the others would only repeat it."""
    yield Check("torch", Status.OK, torch.__version__)
    if torch.version.cuda is None:
        yield Check("CUDA", Status.FAIL, "this torch is built without it", "install a build of torch with CUDA")
        return
    if not torch.cuda.is_available():
        found = f"torch is built for CUDA {torch.version.cuda}, and finds no device"
        yield Check("CUDA", Status.FAIL, found, "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES")
        return
    yield Check("CUDA", Status.OK, f"{torch.version.cuda}, {counted(torch.cuda.device_count(), 'device')}")
    for index in range(torch.cuda.device_count()):
        yield _at_work(index)
    yield from _ways()
    yield _nccl()
    for name in _VARIABLES:
        if value := os.environ.get(name):
            slow = _SLOW.get(name) == value
            remedy = "unset it unless you look for a fault" if slow else ""
            yield Check(name, Status.WARN if slow else Status.OK, value, remedy)


def _at_work(index: int) -> Check:
    name = f"cuda:{index}"
    try:
        properties = torch.cuda.get_device_properties(index)
        result = float((torch.ones(64, 64, device=name) @ torch.ones(64, 64, device=name)).sum().item())
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        words = str(error).strip().partition("\n")[0]
        return Check(name, Status.FAIL, words, "look at nvidia-smi: is it in use, or in exclusive mode?")
    memory = f"{format_bytes(free)} of {format_bytes(total)} free"
    if result != 64.0**3:
        return Check(name, Status.FAIL, f"{properties.name} computes {result:g} instead of {64**3}", "replace it")
    return Check(name, Status.OK, f"{properties.name}, {memory}")


def _ways() -> Iterator[Check]:
    count = torch.cuda.device_count()
    if count < 2:
        return
    # Pipelines send to neighbours above all.
    cut = [f"{i}-{i + 1}" for i in range(count - 1) if not torch.cuda.can_device_access_peer(i, i + 1)]
    if cut:
        yield Check("peer access", Status.WARN, f"none between {', '.join(cut)}", "these tensors go through the host")
    else:
        yield Check("peer access", Status.OK, "between all neighbours")


def _nccl() -> Check:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        remedy = "install a build of torch with it; pipelines in one process work without"
        return Check("NCCL", Status.WARN, "this torch is built without it", remedy)
    return Check("NCCL", Status.OK, ".".join(map(str, torch.cuda.nccl.version())))
