"""What moves tensors between the XLA devices of one process: through the host, or by a common permutation program.

Both deliver the messages of one tick together, before its computations are started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from ppdsl.runtime.layout import Layout
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.stuck import WATCH

__all__ = ["Carrier", "HostCarrier", "PermuteCarrier", "XlaMailbox"]

Pair = tuple[int, int]

_LONG = 2.0
"""Seconds of one tick, far below those after which the CPU client gives up."""


class Carrier(Protocol):
    """Moves the tensors of a tick; ranks are positions of devices."""

    name: str

    def plan(self, parcels: Iterable[Parcel]) -> None:
        """Get ready for a plan's messages."""

    def deliver(self, cargo: Sequence[tuple[Parcel, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the tensors where their messages go, in the order of `cargo`."""

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return one tensor, which is materialised, on another device."""

    def settle(self) -> None:
        """Take notice that a step's last message was delivered."""


class XlaMailbox:
    """The transport of all ranks: what is sent stays where it is until the driver has it delivered."""

    def __init__(self) -> None:
        self._sent: dict[int, torch.Tensor] = {}
        self._there: dict[int, torch.Tensor] = {}

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Keep `tensor` for `deliver`."""
        self._sent[parcel.index] = tensor

    def recv(self, parcel: Parcel) -> None:
        """Do nothing: the driver delivers what a computation needs before it."""

    def ready(self, parcel: Parcel) -> bool:
        """Whether the parcel was delivered."""
        return parcel.index in self._there

    def wait(self, parcel: Parcel) -> torch.Tensor:
        """Return the parcel's tensor."""
        return self._there.pop(parcel.index)

    def drain(self) -> None:
        """Do nothing: a device keeps what it still reads."""

    def close(self) -> None:
        """Drop what nobody fetched."""
        self._sent.clear()
        self._there.clear()

    def deliver(self, parcels: Sequence[Parcel], carrier: Carrier) -> None:
        """Bring parcels to their targets."""
        cargo = [(parcel, self._sent.pop(parcel.index)) for parcel in parcels]
        if cargo:
            arrived = carrier.deliver(cargo)
            self._there.update((parcel.index, value) for (parcel, _), value in zip(cargo, arrived, strict=True))


class HostCarrier:
    """Through the host, by public calls only: the driver waits until each tensor is computed."""

    name = "host"

    def __init__(self, device_of: Callable[[int], torch.device]) -> None:
        self._device_of = device_of

    def plan(self, parcels: Iterable[Parcel]) -> None:
        """Do nothing."""

    def deliver(self, cargo: Sequence[tuple[Parcel, torch.Tensor]]) -> list[torch.Tensor]:
        """Copy each tensor to the host and on to its target."""
        arrived = []
        for parcel, tensor in cargo:
            arrived.append(xla_adapter.host_copy(tensor).to(self._device_of(parcel.message.target)))
        for device in {tensor.device for tensor in arrived}:
            # Uploads now: a scalar that is not on the device yet would become a constant of the next program.
            xla_adapter.launch(device)
        return arrived

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy the tensor to the host and on to `device`."""
        moved = xla_adapter.host_copy(tensor).to(device)
        xla_adapter.launch(device)
        return moved

    def settle(self) -> None:
        """Do nothing."""


class PermuteCarrier:
    """One small program, the same on every local device, for each kind of tensor; no copy to the host.

    The pairs of ranks between which tensors of one shape and type ever travel are split into rounds in which each rank
    sends and receives at most once. A round is one program, always with all of its pairs: a rank that has nothing to
    send gives a tensor that nobody reads. So there are few programs, and they do not depend on the tick.

    Args:
        device_of: The device of each rank.
        devices: How many there are.
        careful: Whether the devices may wait for each other only so long before the client ends the process, as those
            of the CPU client do. Then the first step waits for all of them before each tick's programs, and measures;
            if one takes long, so do all later steps.
    """

    name = "permute"

    def __init__(self, device_of: Callable[[int], torch.device], devices: int, *, careful: bool = False) -> None:
        self._devices = [device_of(rank) for rank in range(devices)]
        self.careful = self._bounded = careful
        self._longest = 0.0
        self._rounds: dict[tuple[torch.Size, torch.dtype], list[list[Pair]]] = {}
        self._fill: dict[tuple[torch.Size, torch.dtype, int], torch.Tensor] = {}

    def plan(self, parcels: Iterable[Parcel]) -> None:
        """Split the pairs of each kind of tensor into rounds."""
        for parcel in parcels:
            message = parcel.message
            rounds = self._rounds.setdefault(_kind(parcel.layout), [])
            pair = (int(message.source), int(message.target))
            if any(pair in pairs for pairs in rounds):
                continue
            for pairs in rounds:
                if all(pair[0] != source and pair[1] != target for source, target in pairs):
                    pairs.append(pair)
                    pairs.sort()
                    break
            else:
                rounds.append([pair])

    def rounds(self) -> dict[tuple[torch.Size, torch.dtype], list[list[Pair]]]:
        """Return for each kind of tensor the pairs of its programs."""
        return self._rounds

    def deliver(self, cargo: Sequence[tuple[Parcel, torch.Tensor]]) -> list[torch.Tensor]:
        """Start as many programs as the tick's messages need."""
        if self.careful:
            begun = time.monotonic()
            xla_adapter.wait()
            self._longest = max(self._longest, time.monotonic() - begun)
        arrived = [tensor for _, tensor in cargo]
        waiting: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for number, (parcel, tensor) in enumerate(cargo):
            if parcel.layout.numel:
                waiting.setdefault(_kind(parcel.layout), []).append(number)
            else:
                arrived[number] = torch.empty_like(tensor, device=self._devices[parcel.message.target])
        for kind, numbers in waiting.items():
            while numbers:
                for pairs in self._rounds[kind]:
                    taken = self._take(cargo, numbers, pairs)
                    if taken:
                        self._run(kind, pairs, taken, cargo, arrived)
        return arrived

    @staticmethod
    def _take(cargo: Sequence[tuple[Parcel, torch.Tensor]], numbers: list[int], pairs: Sequence[Pair]) -> list[int]:
        """Take from `numbers` at most one message for each pair."""
        taken: dict[Pair, int] = {}
        for number in numbers:
            message = cargo[number][0].message
            taken.setdefault((int(message.source), int(message.target)), number)
        found = [number for pair, number in taken.items() if pair in pairs]
        for number in found:
            numbers.remove(number)
        return found

    def _run(
        self,
        kind: tuple[torch.Size, torch.dtype],
        pairs: Sequence[Pair],
        numbers: Sequence[int],
        cargo: Sequence[tuple[Parcel, torch.Tensor]],
        arrived: list[torch.Tensor],
    ) -> None:
        given = {int(cargo[number][0].message.source): cargo[number][1] for number in numbers}
        row = [given[rank] if rank in given else self._filling(kind, rank) for rank in range(len(self._devices))]
        texts = "; ".join(cargo[number][0].text for number in numbers)
        WATCH.transfer(f"The transfer between XLA devices ({texts})", len(row))
        moved = xla_adapter.permute(row, pairs)
        for number in numbers:
            arrived[number] = moved[cargo[number][0].message.target]

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Start a program for this pair of devices; others give a tensor for its time only."""
        if self._bounded:
            xla_adapter.wait()
        row = [tensor if other == tensor.device else torch.zeros_like(tensor, device=other) for other in self._devices]
        for given in row:
            xla_adapter.launch(given.device)
        source, target = self._devices.index(tensor.device), self._devices.index(device)
        WATCH.transfer(f"The transfer from xla:{source} to xla:{target}", len(row))
        return xla_adapter.permute(row, [(source, target)])[target]

    def settle(self) -> None:
        """Let later steps run ahead if this one's ticks were short."""
        self.careful, self._longest = self.careful and self._longest > _LONG, 0.0

    def _filling(self, kind: tuple[torch.Size, torch.dtype], rank: int) -> torch.Tensor:
        key = (*kind, rank)
        if key not in self._fill:
            device = self._devices[rank]
            self._fill[key] = torch.zeros(kind[0], dtype=kind[1]).to(device)
            xla_adapter.launch(device)
        return self._fill[key]


def _kind(layout: Layout) -> tuple[torch.Size, torch.dtype]:
    return layout.shape, layout.dtype
