"""Ranks as processes of torch.distributed: gloo on CPU, NCCL on CUDA; one pipeline, or several that train together."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.plan.messages import Message, MessagePlan
from ppdsl.recording import compat
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.processes.board import Board
from ppdsl.runtime.processes.channels import Channels
from ppdsl.runtime.processes.transport import ProcessTransport
from ppdsl.runtime.processes.waiting import destroy
from ppdsl.runtime.processes.watch import Watch
from ppdsl.runtime.replicas.fleet import MeshLike, fleet_of
from ppdsl.runtime.replicas.replicas import Replicas
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.world import World

__all__ = [
    "DistributedWorld", "ProcessTransport", "agree_on_call", "of_own_pipeline", "replica_of", "replicas_of",
    "told_by_replicas", "writes_shared",
]  # fmt: skip

_SHARE_TAG = 1_000_000_000

_numbers = itertools.count()


class DistributedWorld:
    """All processes of the default group: the ranks of this process's pipeline, and those of its replicas.

    Args:
        timeout: Seconds to wait for another rank, in a step and before it.
        device: Where this rank computes; None: the local CUDA device when the default group has NCCL, else the CPU.
        mesh: Which processes are a pipeline; None: all.

    Attributes:
        board: What all processes tell each other, those of other replicas, too.
        channels: What moves bytes.
        fleet: Who they are.
        rank: This process among the ranks of its pipeline.
        ranks: How many these are.
        replicas: The replicas of this rank; None when there is one pipeline alone.

    Raises:
        CallError: The mesh does not fit the processes, or they disagree on it.
    """

    def __init__(self, timeout: float, device: torch.device | None = None, mesh: MeshLike = None) -> None:
        self._timeout = timeout
        self._nccl = torch.cuda.is_available() and _default_has_nccl()
        self._device = device or (_local_cuda() if self._nccl else torch.device("cpu"))
        self._nccl = self._nccl and self._device.type == "cuda"
        store = PrefixStore(f"ppdsl/{next(_numbers)}", compat.default_store())
        process, processes = dist.get_rank(), dist.get_world_size()
        self.board = Board(store, process, processes, timeout)
        # Weakly: a pipeline that nobody holds any more takes its thread with it.
        closing: list[Any] = []
        self._watch = Watch(self.board, weakref.WeakMethod(self._break))
        self._end = weakref.finalize(self, _end, self._watch, self.board, closing)
        self._broken: str | None = None
        moment = "the building of the pipeline"
        try:
            self.fleet = fleet_of(mesh, process, processes)
        except CallError as error:
            self.refuse(moment, error)
            self._end()
            raise
        self.rank, self.ranks = self.fleet.members.index(process), len(self.fleet.members)
        # A rank that does not come is named here; a group itself would only run into its time-out.
        self.agree(moment, {"the mesh": self.fleet.text})
        self.board.names, self.board.pipelines = self.fleet.names, self.fleet.pipelines
        try:
            self.channels = Channels(self.fleet, self.board, self._device, closing, nccl=self._nccl)
        except BaseException as error:
            self._stop(error)
            raise
        count = self.fleet.replicas
        self.replicas = Replicas(self.channels, count, staged=self.staged) if count > 1 else None

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return the number of processes of a pipeline."""
        return self.ranks

    def holds(self, rank: int) -> bool:
        """Whether `rank` is this process."""
        return rank == self.rank

    def device(self, rank: int) -> torch.device | None:
        """Return this process's device."""
        return self._device

    def agree(self, moment: str, facts: Mapping[str, str], own: Mapping[str, str] | None = None) -> None:
        """Return when every rank has come here with the same facts.

        Args:
            moment: When this happens.
            facts: What has to be equal on all processes.
            own: What has to be equal on the ranks of a pipeline; its replicas may differ.

        Raises:
            CallError: Facts differ, or another rank refused.
            RunError: A rank does not come, or the pipeline has failed before.
        """
        self._check_usable()
        try:
            self.board.agree(moment, facts, own)
        except CallError:
            raise
        except BaseException as error:
            self._stop(error)
            raise

    def refuse(self, moment: str, error: Exception) -> None:
        """Tell the ranks that come here that this one does not go on."""
        if self._broken is None:
            self.board.refuse(moment, error)

    def _check_usable(self) -> None:
        if self._broken is not None:
            message = "This pipeline has ended, and its channels are closed."
            raise RunError(Diagnostic("pipeline-ended", message, excerpt=self._broken))

    def connect(self, plan: MessagePlan, pairs: Sequence[tuple[int, int]]) -> None:
        """Make the communicators of every ordered pair of ranks that needs one and has none, in ascending order."""
        sends = {(message.source, message.target) for message in plan.messages}
        self.channels.connect(sends | set(pairs))

    def transport(self, rank: int, parcels: Mapping[Message, Parcel]) -> ProcessTransport:
        """Return a transport of this process."""
        return ProcessTransport(self)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Watch for failures of other ranks while the body runs, and publish what it raises."""
        self._check_usable()
        with self._watch:
            try:
                yield
            except BaseException as error:
                self._stop(error)
                raise

    def _stop(self, error: BaseException) -> None:
        self._broken = str(error) or type(error).__name__
        self.board.publish(error)
        self.board.linger()

    def run(self, executors: Sequence[Executor]) -> None:
        """Run this rank's list to its end, then wait until all it sent has left.

        Raises:
            RunError: This rank or another one failed.
        """
        for executor in executors:
            executor.advance()
            executor.drain()
        if self._nccl:
            self._wait_for_device()

    def _wait_for_device(self) -> None:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        end = time.monotonic() + self._timeout
        while not done.query():
            self.board.raise_failure("while its device finished the step")
            if time.monotonic() > end:
                message = f"Rank {self.board.name}'s device did not finish the step within {self._timeout:g} seconds."
                raise RunError(Diagnostic("timed-out", message, help="a peer may hang; timeout= sets the wait"))
            time.sleep(0.0005)

    # ---------------------------------------------------------------- values of the whole step

    @property
    def staged(self) -> bool:
        """Whether tensors go through host memory: a CUDA device, but no NCCL."""
        return self._device.type != "cpu" and not self._nccl

    def share(
        self, tensor: torch.Tensor | None, source: int, targets: Sequence[int], layout: Layout, device: torch.device
    ) -> torch.Tensor | None:
        """Give `source`'s tensor to `targets`, one after the other; each returns it on `device`, others return None.

        Raises:
            RunError: A rank failed.
        """
        if self.rank == source and tensor is not None:
            row = layout.wire(layout.conform(tensor.detach().to(device)))
            others = [target for target in targets if target != source] if layout.numel else []
            works = [(self._start_shared(row, source, target), target) for target in others]
            for work, target in works:
                self.channels.finish(work, row, target, "a value of the whole step")
            return tensor if source in targets else None
        if self.rank not in targets or self.rank == source:
            return None
        result = layout.empty(device)
        if layout.numel:
            row = layout.wire(result)
            self.channels.finish(self._start_shared(row, source, self.rank), row, source, "a value of the whole step")
        return result

    def _start_shared(self, row: torch.Tensor, source: int, target: int) -> Any:
        return self.channels.start(row, source, target, _SHARE_TAG)

    def gather(self, text: str) -> tuple[str, ...]:
        """Return the text of every process, in the order of ranks."""
        return self.board.gather(text)

    def _break(self) -> None:
        self.channels.break_off()

    def close(self) -> None:
        """Stop watching, and say that this process makes no more steps."""
        self._broken = self._broken or "It was closed."
        self._end()


def replicas_of(world: World) -> Replicas | None:
    """Return the replicas of a world's rank; None when there is one pipeline alone."""
    return world.replicas if isinstance(world, DistributedWorld) else None


def agree_on_call(world: World, moment: str, facts: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Return when every rank has come here, with the facts of all replicas and those of its own pipeline.

    Raises:
        CallError: Facts differ, or another rank refused.
        RunError: A rank does not come.
    """
    if isinstance(world, DistributedWorld):
        world.agree(moment, facts, own)
    else:
        world.agree(moment, {**facts, **own})


def replica_of(world: World) -> int:
    """Return the number of this process's pipeline among its replicas."""
    return world.fleet.team.index(world.board.rank) if isinstance(world, DistributedWorld) else 0


def told_by_replicas(world: World, name: str) -> tuple[str, ...]:
    """Return what this rank's replicas said in the last agreement; nothing where there is one pipeline alone."""
    if not isinstance(world, DistributedWorld) or world.replicas is None:
        return ()
    return tuple(world.board.told[process][name] for process in world.fleet.team)


def of_own_pipeline(texts: Sequence[str], world: World) -> tuple[str, ...]:
    """Return the texts of this process's pipeline, in the order of its ranks, out of those of all processes."""
    return (
        tuple(texts[member] for member in world.fleet.members) if isinstance(world, DistributedWorld) else tuple(texts)
    )


def writes_shared(world: World) -> bool:
    """Whether this process writes what all replicas, and all tensor-parallel peers, have in common."""
    return not isinstance(world, DistributedWorld) or (replica_of(world) == 0 and world.fleet.first_of_peers)


def _end(watch: Watch, board: Board, closing: list[Any]) -> None:
    watch.close()
    board.leave()
    destroy(closing)


def _default_has_nccl() -> bool:
    return "nccl" in f"{dist.get_backend()} {dist.get_backend_config()}"


def _local_cuda() -> torch.device:
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", index % max(1, torch.cuda.device_count()))
