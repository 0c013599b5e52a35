"""What has to be true before torch_xla runs a pipeline: one clear error for each thing that is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.units import counted

__all__ = ["check_installation", "require_devices", "start", "wants_xla"]


def wants_xla(devices: Any, runtime: str | None) -> bool:
    """Whether a pipeline is to run on XLA devices.

    Args:
        devices: What the user gave: a device, several, or None.
        runtime: What the user gave.

    Raises:
        CallError: The choice is impossible.

    >>> wants_xla("xla", None), wants_xla(None, "xla"), wants_xla("cpu", None)
    (True, True, False)
    """
    several = isinstance(devices, Sequence) and not isinstance(devices, str)
    given = [str(device) for device in (devices if several else [] if devices is None else [devices])]
    named = any(name.partition(":")[0] == "xla" for name in given)
    if (named or runtime == "xla") and (given not in ([], ["xla"]) or runtime not in (None, "xla")):
        message = f"devices is {devices!r} and runtime {runtime!r}, but on XLA devices rank r runs on xla:r."
        raise CallError(Diagnostic("xla-devices", message, help='give devices="xla", and placement= if need be'))
    return named or runtime == "xla"


def start() -> int:
    """Start torch_xla's runtime and return how many devices this process drives.

    Raises:
        CallError: torch_xla is missing, does not fit torch, or finds no device.
    """
    check_installation()
    if os.environ["PJRT_DEVICE"] == "CPU":
        # A program that writes into the memory of its operands (`.grad`) would keep the CPU client from taking the next
        # one of its device before it has run, and so the driver waiting. torch_xla reads this when it first compiles.
        os.environ.setdefault("XLA_ENABLE_PARAM_ALIASING", "0")
    try:
        count = xla_adapter.device_count()
    except Exception as error:
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        message = f"torch_xla cannot start on PJRT_DEVICE={os.environ['PJRT_DEVICE']}: {text}"
        raise CallError(Diagnostic("xla-no-device", message, help="look at PJRT_DEVICE and the driver")) from error
    _require_backward(count)
    return count


def check_installation() -> None:
    """Look whether torch_xla can be started, without starting it.

    Raises:
        CallError: It is missing, does not fit torch, or was not told its devices.
    """
    torch_version, xla_version = xla_adapter.versions()
    if not xla_version or not xla_adapter.is_installed():
        message = "devices is xla, but torch_xla is not installed."
        raise CallError(Diagnostic("xla-missing", message, help="pip install torch==2.9.* torch_xla==2.9.*"))
    wanted = xla_adapter.required_torch()
    if not torch_version.startswith(f"{wanted}."):
        message = f"torch_xla {xla_version} was built for torch {wanted}, and torch is {torch_version}."
        advice = f"pip install torch=={wanted}.* torch_xla=={wanted}.*"
        raise CallError(Diagnostic("xla-versions", message, help=advice))
    if not os.environ.get("PJRT_DEVICE"):
        message = "PJRT_DEVICE is not set, so torch_xla does not know which devices to take."
        raise CallError(Diagnostic("xla-no-device", message, help="set PJRT_DEVICE=TPU, or PJRT_DEVICE=CPU to try"))


@cache
def _require_backward(count: int) -> None:
    """Look whether autograd knows the devices.

    Raises:
        CallError: It began its work before torch_xla did; then it has no thread for them, and never will.
    """
    leaf = torch.zeros(1, device=xla_adapter.device_of(count - 1), requires_grad=True)
    try:
        (leaf * 2).sum().backward()
    except RuntimeError as error:
        message = "A backward has run in this process before torch_xla had started, so autograd knows no XLA device."
        advice = "call torch_xla.device() before the first backward"
        raise CallError(Diagnostic("xla-late", message, help=advice)) from error


def require_devices(wanted: int, there: int) -> None:
    """Look whether there are enough devices.

    Raises:
        CallError: There are fewer than ranks.
    """
    if wanted > there:
        message = f"The pipeline has {counted(wanted, 'rank')}, but this process has {counted(there, 'XLA device')}."
        advice = f"place the stages on {counted(there, 'rank')}, or start with more devices"
        if os.environ.get("PJRT_DEVICE") == "CPU":
            advice += f" (CPU_NUM_DEVICES={wanted})"
        raise CallError(Diagnostic("xla-few-devices", message, help=advice))
