"""One small case for each collective, and the process that runs them: `python -m ...cases NAME ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from ppdsl.diagnostics import PpdslError
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives import calls, moving
from ppdsl.runtime.xla.collectives.launching import wait_for

__all__ = ["CASES", "run_case"]

Tensors = tuple[torch.Tensor, ...]
Case = Callable[[list[torch.Tensor]], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""Given a tensor on the host for each device: what the collective returns, and what it should, on the host."""


def run_case(name: str, timeout: float) -> str:
    """Return "" when a collective is right, or why it is not; returns in time, whatever happens.

    Args:
        name: One of `CASES`.
        timeout: Seconds to wait for its results.
    """
    count = adapter.device_count()
    own = [torch.arange(2.0 * count).reshape(2 * count, 1) + 100 * position for position in range(count)]
    try:
        made, expected = CASES[name](own)
        wait_for(made, timeout, f"The {name}")
    except (PpdslError, RuntimeError, ValueError) as error:
        found = error.diagnostics[0].message.rstrip(".") if isinstance(error, PpdslError) else str(error)
        return " ".join(found.split())[:200]
    for position, (result, right) in enumerate(zip(made, expected, strict=True)):
        if not torch.equal(adapter.host_copy(result), right):
            return f"result {position} is wrong"
    return ""


def _on_devices(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(adapter.device_of(position)) for position, tensor in enumerate(tensors)]


def _ring(count: int) -> list[tuple[int, int]]:
    return [(position, (position + 1) % count) for position in range(count)]


def _send(transport: str) -> Case:
    def case(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        last = len(own) - 1
        sent = moving.send(own[0].to(adapter.device_of(0)), last, transport)
        return (moving.recv(sent, last),), (own[0],)

    return case


def _permute(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return moving.collective_permute(_on_devices(own), _ring(len(own))), tuple(own)


def _scatter(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    together = [tensor.to(adapter.device_of(0)) for tensor in own]
    return moving.scatter(together, range(len(own))), tuple(own)


def _gather(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return moving.gather(_on_devices(own), 0), tuple(own)


def _broadcast(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    count = len(own)
    return calls.broadcast(own[0].to(adapter.device_of(0)), range(count)), (own[0],) * count


def _reduce(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return (calls.reduce(_on_devices(own), 0),), (torch.stack(own).sum(0),)


def _all_reduce(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return calls.all_reduce(_on_devices(own)), (torch.stack(own).sum(0),) * len(own)


def _all_gather(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return calls.all_gather(_on_devices(own)), (torch.cat(own),) * len(own)


def _reduce_scatter(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    return calls.reduce_scatter(_on_devices(own)), torch.stack(own).sum(0).chunk(len(own))


def _all_to_all(own: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
    pieces = [tensor.chunk(len(own)) for tensor in own]
    return calls.all_to_all(_on_devices(own)), tuple(torch.cat(column) for column in zip(*pieces, strict=True))


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "send": _send("permute"),
        "send by all_reduce": _send("all_reduce"),
        "collective_permute": _permute,
        "scatter": _scatter,
        "gather": _gather,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
)


def _main(names: Sequence[str]) -> None:
    adapter.device_count()
    for name in names:
        reason = run_case(name, 30.0)
        sys.stdout.write(f"ppdsl failed: {name}: {reason}\n" if reason else f"ppdsl passed: {name}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1:])
