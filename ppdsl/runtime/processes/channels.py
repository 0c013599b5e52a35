"""Moving bytes between processes, so that a failure anywhere ends every wait.

With gloo all ranks of a pipeline share one group of its own, and a parcel's tag is its number in the plan: gloo
connects every pair when the group is made, keeps a pair in order, and never confuses two tags. Small messages on the
CPU between processes of one machine go through sockets of its kernel instead (`near`). NCCL has no tags and one queue
for each communicator, so every ordered pair of ranks gets a communicator of its own, made by all ranks in the same
order before the first step; the two directions of a pair never wait for each other.

Ranks are those of the pipeline; torch knows processes by their number in the default group. The replicas of a rank
have a group of their own, and with NCCL one more for what is on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ppdsl.diagnostics import RunError
from ppdsl.runtime.processes.board import Board
from ppdsl.runtime.processes.finding import connected
from ppdsl.runtime.processes.near import Arrival, Near
from ppdsl.runtime.processes.waiting import no_connection, wait_for
from ppdsl.runtime.replicas.fleet import Fleet

__all__ = ["Channels"]

_BREAK_TAG = 1_000_000_001


class Channels:
    """The groups of one process. Making one is a call that all processes make together.

    Args:
        fleet: Which processes there are.
        board: Where failures are published.
        device: Where this rank computes.
        nccl: Whether NCCL moves what is there.
        closing: Gets the groups that have to be closed with the pipeline.

    Raises:
        RunError: Processes cannot be connected.
    """

    def __init__(
        self, fleet: Fleet, board: Board, device: torch.device, closing: list[Any] | None = None, *, nccl: bool
    ) -> None:
        self._fleet = fleet
        self._board = board
        self._device = device
        self._nccl = nccl
        self._interrupted = False
        self._closing = [] if closing is None else closing
        # Longer than ours, so that it is ppdsl that says what was awaited.
        self._limit = timedelta(seconds=2 * board.timeout + 30)
        self._pairs: dict[tuple[int, int], Any] = {}
        self._own = fleet.members.index(board.rank)
        self._group = self._made(fleet.pipelines, fleet.members, "gloo")
        self.near = self._found()
        self._team = self._team_on_device = None
        if fleet.replicas > 1:
            self._team = self._made(fleet.teams, fleet.team, "gloo")
            self._team_on_device = self._made(fleet.teams, fleet.team, "nccl") if nccl else None

    def _made(self, groups: Iterable[Sequence[int]], mine: Sequence[int], backend: str) -> Any:
        """Make groups of processes; all processes make all groups, in one order.

        Raises:
            RunError: They cannot be connected.
        """
        made = {}
        for group in groups:
            try:
                made[tuple(group)] = dist.new_group(list(group), backend=backend, timeout=self._limit)
            except RuntimeError as error:
                raise RunError(no_connection(self._board.name, error)) from error
        if backend == "gloo":
            self._closing.append(made[tuple(mine)])
        return made[tuple(mine)]

    def _found(self) -> Near:
        """Find the processes of this machine; all processes come here together.

        Raises:
            RunError: One of them is gone again.
        """
        moment = "the building of the pipeline"
        try:
            near = connected(
                self._fleet.members, self._own, lambda text: self._board.gather(text, moment), self._board.timeout
            )
        except OSError as error:
            raise RunError(no_connection(self._board.name, error)) from error
        self._closing.append(near)
        if near.complete and self._fleet.members == tuple(range(self._board.ranks)) and self._board.ranks > 1:
            self._board.lines = near
        return near

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make the communicators of ordered pairs of ranks that have none, in ascending order; all processes come here.

        With gloo there is nothing to do.
        """
        if not self._nccl:
            return
        for source, target in sorted(set(pairs) - self._pairs.keys()):
            for members in self._fleet.pipelines:
                group = dist.new_group([members[source], members[target]], backend="nccl", timeout=self._limit)
                if members == self._fleet.members:
                    self._pairs[source, target] = group
            if self._own in (source, target):
                # The communicator comes to life with its first message, so that comes here, in one order for all.
                probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self.start(probe, source, target, 0).wait()
                torch.cuda.synchronize(self._device)

    # ---------------------------------------------------------------- between ranks of this pipeline

    def start(self, row: torch.Tensor, source: int, target: int, tag: int) -> Any:
        """Start moving a row of bytes from rank `source` to rank `target`, one of which is this one."""
        sends = source == self._own
        if not row.is_cuda and self.near.reaches(target if sends else source, row.nbytes):
            if sends:
                return self.near.send(target, tag, row.data_ptr(), row.nbytes)
            return Arrival(self.near, source, tag, row)
        return self.start_apart(row, source, target, tag)

    def start_apart(self, row: torch.Tensor, source: int, target: int, tag: int) -> Any:
        """Do the same without the lines of the machine, which belong to main threads; any thread may call it."""
        sends = source == self._own
        group = self._pairs[source, target] if row.is_cuda else self._group
        peer = self._fleet.members[target if sends else source]
        return (dist.isend if sends else dist.irecv)(row, peer, group=group, tag=0 if row.is_cuda else tag)

    def finish(self, work: Any, row: torch.Tensor, peer: int, text: str) -> None:
        """Wait for the moving of a row with rank `peer`; `text` says what it is; on CUDA the device waits.

        Raises:
            RunError: It failed, or took too long.
        """
        self._await(work, row, self._fleet.members[peer], text)

    def _await(self, work: Any, row: torch.Tensor, process: int, text: str) -> None:
        if row.is_cuda:
            # With a time-out NCCL would block the host; the end of the step looks at the clock instead.
            work.wait()
            return
        wait_for(work, process, text, self._board, self._board.silent, interrupted=lambda: self._interrupted)

    # ---------------------------------------------------------------- between replicas of this rank

    @property
    def replicas_group(self) -> Any:
        """The group of this rank's replicas, for what is on this rank's device; None without replicas."""
        return self._team_on_device or self._team

    def add_up(self, row: torch.Tensor) -> Any:
        """Start adding the replicas' rows in place."""
        return dist.all_reduce(row, group=self._of_replicas(row), async_op=True)

    def take_first(self, row: torch.Tensor) -> Any:
        """Start overwriting the row with that of the first replica."""
        return dist.broadcast(row, self._fleet.team[0], group=self._of_replicas(row), async_op=True)

    def collect(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the replicas' rows on the CPU, in the order of replicas.

        Raises:
            RunError: A replica failed.
        """
        row = row.cpu()
        rows = [torch.empty_like(row) for _ in self._fleet.team]
        self.finish_replicas(dist.all_gather(rows, row, group=self._team, async_op=True), row, "a value of the step")
        return tuple(rows)

    def finish_replicas(self, work: Any, row: torch.Tensor, text: str) -> None:
        """Wait for what replicas do together; `text` says what it is.

        Raises:
            RunError: It failed, or took too long.
        """
        team = self._fleet.team
        other = team[(team.index(self._board.rank) + 1) % len(team)]
        self._await(work, row, other, text)

    def _of_replicas(self, row: torch.Tensor) -> Any:
        return self._team_on_device if row.is_cuda else self._team

    # ---------------------------------------------------------------- the end

    def break_off(self) -> None:
        """Make a pending wait of the main thread end, as another rank has failed.

        gloo has no way to abort one wait from outside, but a wait that runs into its time-out closes all connections
        of its group, and with them every other wait.
        """
        self._interrupted = True
        self.near.break_off()
        for group in (*self._pairs.values(), self._team_on_device):
            with contextlib.suppress(Exception):
                group.abort()
        for members, group in ((self._fleet.members, self._group), (self._fleet.team, self._team)):
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    peer = members[(members.index(self._board.rank) + 1) % len(members)]
                    work: Any = dist.irecv(torch.empty(1), peer, group=group, tag=_BREAK_TAG)
                    work.wait(timedelta(milliseconds=1))
