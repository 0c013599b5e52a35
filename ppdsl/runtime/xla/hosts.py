"""Ranks on the XLA devices of several processes: each process drives its own devices as one alone does.

Between the devices of a process tensors travel as in `XlaWorld`, between processes by gloo. One plan holds for all
ranks; each process goes through its part of it in an order in which no process waits for ever (`ppdsl/plan/merged.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.plan.merged import Round, merge
from ppdsl.plan.messages import Message, MessagePlan
from ppdsl.plan.ticks import Turn
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.moving import fetched
from ppdsl.runtime.processes.distributed import DistributedWorld
from ppdsl.runtime.replicas.fleet import MeshLike
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla.devices import XlaWorld
from ppdsl.runtime.xla.driver import Driver
from ppdsl.runtime.xla.places import Places
from ppdsl.runtime.xla.posting import HostsMailbox
from ppdsl.runtime.xla.stage import Move
from ppdsl.runtime.xla.transport import Carrier
from ppdsl.units import Rank

__all__ = ["HostsWorld"]

_CPU = torch.device("cpu")
_MOMENT = "the start of the XLA devices"


class HostsWorld(XlaWorld):
    """Every rank is an XLA device of one of the processes of torch.distributed.

    Args:
        timeout: Seconds to wait for another process, in a step and before it.
        transport: What moves tensors between the devices of this process: `host`, `permute`, or `auto`.
        mesh: Which processes are a pipeline; only one of all of them is possible.

    Attributes:
        processes: All processes, each as one rank of a pipeline on the CPU.
        places: Who drives which rank.

    Raises:
        CallError: torch.distributed has another backend than gloo, the mesh has replicas, or a process has no devices.
        RunError: A process does not come.
    """

    def __init__(self, timeout: float, transport: str = "auto", mesh: MeshLike = None) -> None:
        _require_gloo()
        self.processes = DistributedWorld(timeout, _CPU)
        try:
            _refuse_replicas(mesh)
            super().__init__(transport, timeout)
        except Exception as error:
            self.processes.refuse(_MOMENT, error)
            self.processes.close()
            raise
        self.processes.agree(_MOMENT, {})
        devices = tuple(map(int, self.processes.gather(str(self.devices))))
        self.places = Places(devices, self.processes.rank)
        board = self.processes.board
        board.names = self.places.names
        self._letters = HostsMailbox(self.processes.channels, board, self.places)
        self._end = weakref.finalize(self, self._letters.outbox.close)

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return the ranks of the placement; without one as many as are wanted and there are.

        Raises:
            CallError: A process would have none.
        """
        ranks = min(keys, self.places.total) if placement is None else super().ranks_for(keys, placement)
        self.places.require_all(ranks)
        return ranks

    def holds(self, rank: int) -> bool:
        """Whether `rank` is a device of this process.

        Raises:
            CallError: No process has so many devices.
        """
        return self.places.process_of(rank) == self.places.own

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank of this process."""
        return xla_adapter.device_of(rank - self.places.first)

    def transport(self, rank: int, parcels: Mapping[Message, Parcel]) -> HostsMailbox:
        """Return the mailbox that the ranks of this process share."""
        self._parcels = parcels
        return self._letters

    # ---------------------------------------------------------------- all processes together

    def agree(self, moment: str, facts: Mapping[str, str]) -> None:
        """Return when every process has come here with the same facts.

        Raises:
            CallError: Facts differ, or another process refused.
            RunError: A process does not come, or the pipeline has failed before.
        """
        self.processes.agree(moment, facts)

    def refuse(self, moment: str, error: Exception) -> None:
        """Tell the processes that come here that this one does not go on."""
        self.processes.refuse(moment, error)

    def connect(self, plan: MessagePlan, pairs: Sequence[tuple[int, int]]) -> None:
        """Look whether the plan has something for each process; their channels are there already.

        Raises:
            CallError: A process has no rank.
        """
        self.places.require_all(len(plan.rows))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch for failures of other processes while the body runs, and publish what it raises.

        Raises:
            RunError: The pipeline has failed before, or the devices are stuck since an earlier step.
        """
        try:
            with self.processes.step(), super().step():
                yield
        finally:
            self._letters.close()

    def gather(self, text: str) -> tuple[str, ...]:
        """Return the text of every process, in their order."""
        return self.processes.gather(text)

    def close(self) -> None:
        """Stop watching, and say that this process makes no more steps."""
        self.processes.close()
        self._end()
        super().close()

    def share(
        self, tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, device: torch.device
    ) -> torch.Tensor | None:
        """Give `source`'s tensor to `targets`; each of their processes returns it on `device`, others return None.

        Raises:
            RunError: A process failed.
        """
        sender, own = self.places.process_of(source), self.places.own
        receivers = sorted({self.places.process_of(target) for target in targets})
        if any(receiver != sender for receiver in receivers):
            mine = None if tensor is None else fetched([tensor])[0]
            found = self.processes.share(mine, sender, receivers, layout, _CPU)
            if own != sender:
                return None if found is None else found.to(device)
        takes_part = own == sender and sender in receivers
        return super().share(tensor, source, targets, layout, device) if takes_part else None

    # ---------------------------------------------------------------- a step

    def run(self, executors: Sequence[Executor]) -> None:
        """Start everything of a step of this process's ranks, and return when all that they sent has left.

        Raises:
            RunError: A stage failed, or another process did.
        """
        driver = self._drivers.get(executors[0])
        if driver is None:
            driver = self._drivers[executors[0]] = self._driver_of(executors)
        try:
            driver.step()
            self._letters.drain()
        except RunError:
            # A tensor that was not sent is why the driver's wait was ended.
            self._letters.outbox.raise_failure()
            raise

    def _driver_of(self, executors: Sequence[Executor]) -> Driver:
        plan, places = executors[0].plan, self.places
        ranks = [places.ranks_of(process, len(plan.rows)) for process in range(len(places.devices))]
        rounds = merge(plan, ranks)[places.own]
        # What moves tensors between local devices knows them by their positions.
        local = {
            message: replace(parcel, message=self._positioned(message))
            for message, parcel in self._parcels.items()
            if self.holds(message.source) and self.holds(message.target)
        }
        carrier = self.choice.make()
        carrier.plan(local.values())
        return _RoundsDriver(executors, {**self._parcels, **local}, self._letters, carrier, self._move, rounds)

    def _positioned(self, message: Message) -> Message:
        first = self.places.first
        return replace(message, source=Rank(message.source - first), target=Rank(message.target - first))

    def explain(self) -> dict[str, Any]:
        """Return what moves tensors and why, and what the stages' programs were found to do."""
        said = super().explain()
        devices = f"{self.places.total} {xla_adapter.device_kind()} of {len(self.places.devices)} processes"
        return said | {"devices": devices, "transport": said["transport"] | {"between processes": "gloo"}}


class _RoundsDriver(Driver):
    """Goes through the rounds of one process.

    Args:
        executors: Of all ranks of this process.
        parcels: Every message with its parcel; those between ranks of this process with positions as ranks.
        mailbox: Where executors leave and find tensors.
        carrier: What moves them within this process; it knows the plan.
        move: Moves a tensor outside the plan to another device.
        rounds: What this process starts together, in order.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        parcels: Mapping[Message, Parcel],
        mailbox: HostsMailbox,
        carrier: Carrier,
        move: Move,
        rounds: Sequence[Round],
    ) -> None:
        super().__init__(executors, parcels, mailbox, carrier, move, [each.turns for each in rounds])
        self._letters = mailbox
        self._posts = [[parcels[message] for message in each.posts] for each in rounds]

    def deliver(self, number: int, parcels: Sequence[Parcel]) -> None:
        """Post the receives that are due, then bring what the turns of a round need."""
        for parcel in self._posts[number]:
            self._letters.post(parcel)
        super().deliver(number, parcels)

    def run(self, turn: Turn) -> None:
        """Start one computation, and have sent what other processes get of it.

        Raises:
            RunError: It failed, or an operand is on a wrong device.
        """
        super().run(turn)
        self._letters.hand_over()


def _require_gloo() -> None:
    """Look whether plain gloo connects the processes.

    Raises:
        CallError: Another backend does; with some of them tensors on the CPU would silently not be sent.
    """
    backends = dist.get_backend_config()
    if {each.rpartition(":")[2] for each in backends.split(",")} != {"gloo"}:
        message = f"A pipeline on the XLA devices of several processes needs gloo between them, but has {backends}."
        advice = 'call torch.distributed.init_process_group("gloo"); XLA collectives between processes are not used'
        raise CallError(Diagnostic("xla-processes", message, help=advice))


def _refuse_replicas(mesh: MeshLike) -> None:
    """Refuse a mesh with replicas.

    Raises:
        CallError: It has some.
    """
    if isinstance(mesh, DeviceMesh) or (mesh is not None and dict(mesh).get("dp", 1) != 1):
        message = "The mesh has replicas, but there are none of a pipeline on the XLA devices of several processes."
        advice = "leave mesh= out, and give the whole batch to one pipeline with more micro-batches"
        raise CallError(Diagnostic("xla-replicas", message, help=advice))
