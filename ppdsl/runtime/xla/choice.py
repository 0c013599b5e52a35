"""Which transport moves tensors between XLA devices: what is known beforehand, then a test that cannot hang.

All local devices have to run a permutation together. Where they cannot, torch_xla would wait and then end the process;
so whatever is known to prevent it is looked at first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.stuck import WATCH
from ppdsl.runtime.xla.transport import Carrier, HostCarrier, PermuteCarrier
from ppdsl.units import counted

__all__ = ["TRANSPORTS", "Choice", "choose", "tested"]

TRANSPORTS = ("auto", "permute", "host")


@dataclass(frozen=True)
class Choice:
    """A transport, and why.

    Attributes:
        name: `permute` or `host`.
        make: Makes one for a plan.
        reason: Why it was taken, a sentence.
    """

    name: str
    make: Callable[[], Carrier]
    reason: str


def choose(transport: str, device_of: Callable[[int], torch.device], devices: int) -> Choice:
    """Return the transport to use.

    Args:
        transport: `auto`, `permute` or `host`.
        device_of: The device of each rank.
        devices: How many there are.

    Raises:
        CallError: There is no such transport, or `permute` was asked for and cannot work.
    """
    if transport not in TRANSPORTS:
        message = f"There is no transport {transport!r}."
        raise CallError(Diagnostic("unknown-transport", message, help=f"one of: {', '.join(TRANSPORTS)}"))
    if transport == "host":
        return Choice("host", lambda: HostCarrier(device_of), "It was asked for.")
    obstacle = _obstacle(devices) or tested(devices)
    if obstacle is None:
        reason = "It was asked for." if transport == "permute" else "Its test at the start gave the right values."
        careful = xla_adapter.device_kind() == "CPU"
        return Choice("permute", lambda: PermuteCarrier(device_of, devices, careful=careful), reason)
    if transport == "permute":
        message = f"Tensors cannot go from device to device by permutation: {obstacle}."
        raise CallError(Diagnostic("xla-no-permute", message, help='give transport="host", or "auto"'))
    return Choice("host", lambda: HostCarrier(device_of), f"Not by permutation: {obstacle}.")


def _obstacle(devices: int) -> str | None:
    """Return why no permutation may even be tried, to follow a colon."""
    everywhere = xla_adapter.replica_count()
    if everywhere != devices:
        return f"this process has {devices} of {counted(everywhere, 'device')}, and all have to take part"
    if devices == 1:
        return "there is one device"
    if xla_adapter.is_spmd():
        return "torch_xla is in SPMD mode, where there is one device"
    if xla_adapter.device_kind() == "CPU":
        threads = int(os.environ.get("XLA_THREAD_POOL_SIZE") or os.cpu_count() or 1)
        if threads < devices:
            return (
                f"torch_xla has {counted(threads, 'thread')} for {devices} devices (set XLA_THREAD_POOL_SIZE={devices})"
            )
    barrier = "xla_tpu_use_enhanced_launch_barrier"
    if f"{barrier}=true" in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return f"LIBTPU_INIT_ARGS has {barrier}=true, with which each program waits for all devices"
    return None


@cache
def tested(devices: int) -> str | None:
    """Send a number around all devices once in a process; return what went wrong, or None.

    Raises:
        RunError: It did not end, and the devices are of no use any more.
    """
    try:
        row = [torch.full((3,), float(rank)).to(xla_adapter.device_of(rank)) for rank in range(devices)]
        for tensor in row:
            xla_adapter.launch(tensor.device)
        WATCH.transfer(f"The test of a permutation between {counted(devices, 'XLA device')}", devices)
        moved = xla_adapter.permute(row, [(rank, (rank + 1) % devices) for rank in range(devices)])
        got = [int(xla_adapter.host_copy(tensor)[0]) for tensor in moved]
    except RunError:
        raise
    except Exception as error:
        return f"its test failed ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
    expected = [(rank - 1) % devices for rank in range(devices)]
    return None if got == expected else f"its test brought {got} instead of {expected}"
