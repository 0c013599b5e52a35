"""Ranks as processes of torch.distributed: gloo on CPU, NCCL on CUDA.

With gloo all ranks of a pipeline share one group of its own, and a parcel's tag is its number in the plan: gloo
connects every pair when the group is made, keeps a pair in order, and never confuses two tags. NCCL has no tags and
one queue for each communicator, so every ordered pair of ranks gets a communicator of its own, made by all ranks in
the same order before the first step; the two directions of a pair never wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ppdsl.diagnostics import CallError, Diagnostic, RunError
from ppdsl.plan.messages import Message, MessagePlan, Send
from ppdsl.recording import compat
from ppdsl.runtime.board import Board
from ppdsl.runtime.executor import Executor
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.transport import Parcel
from ppdsl.runtime.watch import Watch

__all__ = ["DistributedWorld", "ProcessTransport"]

_SHARE_TAG = 1_000_000_000
_BREAK_TAG = 1_000_000_001
_WINDOW = 8
"""Sends to one rank that may be under way; a plan is legal even when every send waits for its receive."""

_numbers = itertools.count()


class DistributedWorld:
    """All processes of the default group, one rank each.

    Args:
        timeout: Seconds to wait for another rank, in a step and before it.
        device: Where this rank computes; None: the local CUDA device when the default group has NCCL, else the CPU.
    """

    def __init__(self, timeout: float, device: torch.device | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = timeout
        self._nccl = torch.cuda.is_available() and _default_has_nccl()
        self._device = device or (_local_cuda() if self._nccl else torch.device("cpu"))
        self._nccl = self._nccl and self._device.type == "cuda"
        store = PrefixStore(f"ppdsl/{next(_numbers)}", compat.default_store())
        self.board = Board(store, self.rank, self.ranks, timeout)
        # Longer than ours, so that it is ppdsl that says what was awaited.
        self._limit = timedelta(seconds=2 * timeout + 30)
        self._pairs: dict[tuple[int, int], Any] = {}
        # Weakly: a pipeline that nobody holds any more takes its thread with it.
        self._watch = Watch(self.board, weakref.WeakMethod(self._break))
        self._end = weakref.finalize(self, _end, self._watch, self.board)
        self._broken: str | None = None
        self._silent: set[int] = set()
        # A rank that does not come is named here; the group itself would only run into its time-out.
        self.agree("the building of the pipeline", {})
        self._group: Any = dist.new_group(list(range(self.ranks)), backend="gloo", timeout=self._limit)

    def ranks_for(self, keys: int, placement: Mapping[int | str, int] | None) -> int:
        """Return the number of processes."""
        return self.ranks

    def holds(self, rank: int) -> bool:
        """Whether `rank` is this process."""
        return rank == self.rank

    def device(self, rank: int) -> torch.device | None:
        """Return this process's device."""
        return self._device

    def agree(self, moment: str, facts: Mapping[str, str]) -> None:
        """Return when every rank has come here with the same facts.

        Raises:
            CallError: Facts differ, or another rank refused.
            RunError: A rank does not come, or the pipeline has failed before.
        """
        self._check_usable()
        try:
            self.board.agree(moment, facts)
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
        if not self._nccl:
            return
        sends = {(s.message.source, s.message.target) for row in plan.rows for s in row if isinstance(s, Send)}
        for source, target in sorted((sends | set(pairs)) - self._pairs.keys()):
            group = dist.new_group([source, target], backend="nccl", timeout=self._limit)
            self._pairs[source, target] = group
            if self.rank in (source, target):
                # The communicator comes to life with its first message, so that comes here, in one order for all.
                probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
                self.start(probe, source, target, 0).wait()
                torch.cuda.synchronize(self._device)

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
        self.board.linger(self._silent)

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
                message = f"Rank {self.rank}'s device did not finish the step within {self._timeout:g} seconds."
                raise RunError(Diagnostic("timed-out", message, help="a peer may hang; timeout= sets the wait"))
            time.sleep(0.0005)

    # ---------------------------------------------------------------- moving bytes

    def start(self, row: torch.Tensor, source: int, target: int, tag: int) -> Any:
        """Start moving a row of bytes from `source` to `target`, one of which is this rank."""
        sends = source == self.rank
        group = self._pairs[source, target] if row.is_cuda else self._group
        peer = target if sends else source
        return (dist.isend if sends else dist.irecv)(row, peer, group=group, tag=0 if row.is_cuda else tag)

    def finish(self, work: Any, row: torch.Tensor, peer: int, text: str) -> None:
        """Wait for the moving of a row with `peer`; `text` says what it is. On CUDA the device waits, not the host.

        Raises:
            RunError: It failed, or took too long.
        """
        if row.is_cuda:
            # With a time-out NCCL would block the host; the end of the step looks at the clock instead.
            work.wait()
            return
        started = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = time.monotonic() - started >= self._timeout
            self._raise_published(f"while waiting for rank {peer} ({text})", patience=0.0 if late else 0.1)
            self._silent.add(peer)
            if late:
                message = f"Rank {self.rank} waited {self._timeout:g} seconds for rank {peer} in vain ({text})."
                advice = f"rank {peer} hangs, or needs longer than timeout= allows"
                raise RunError(Diagnostic("timed-out", message, help=advice)) from error
            message = f"Rank {peer} is gone without a word, while rank {self.rank} waited for it ({text})."
            raise RunError(Diagnostic("rank-lost", message)) from error

    def _raise_published(self, waiting: str, patience: float) -> None:
        """Raise what another rank has published; one that gives up closes its connections a moment before.

        Raises:
            RunError: There is something.
        """
        try:
            self.board.raise_failure(waiting, patience)
        except RunError as error:
            if error.diagnostics[0].code != "store-lost":
                raise

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
                self.finish(work, row, target, "a value of the whole step")
            return tensor if source in targets else None
        if self.rank not in targets or self.rank == source:
            return None
        result = layout.empty(device)
        if layout.numel:
            row = layout.wire(result)
            self.finish(self._start_shared(row, source, self.rank), row, source, "a value of the whole step")
        return result

    def _start_shared(self, row: torch.Tensor, source: int, target: int) -> Any:
        return self.start(row, source, target, _SHARE_TAG)

    def gather(self, text: str) -> tuple[str, ...]:
        """Return the text of every process, in the order of ranks."""
        return self.board.gather(text)

    def _break(self) -> None:
        """Make a pending wait of the main thread end, as another rank has failed.

        gloo has no way to abort one wait from outside, but a wait that runs into its time-out closes all connections
        of its group, and with them every other wait.
        """
        for group in self._pairs.values():
            with contextlib.suppress(Exception):
                group.abort()
        with contextlib.suppress(RuntimeError):
            peer = (self.rank + 1) % self.ranks
            work: Any = dist.irecv(torch.empty(1), peer, group=self._group, tag=_BREAK_TAG)
            work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Stop watching, and say that this process makes no more steps."""
        self._broken = self._broken or "It was closed."
        self._end()


class ProcessTransport:
    """Carries the parcels of one process."""

    def __init__(self, world: DistributedWorld) -> None:
        self._world = world
        self._device = world.device(world.rank) or torch.device("cpu")
        self._wire_device = torch.device("cpu") if world.staged else self._device
        self._receiving: dict[int, tuple[Any, torch.Tensor]] = {}
        self._sending: dict[int, deque[tuple[Any, Parcel, torch.Tensor]]] = {}

    def send(self, parcel: Parcel, tensor: torch.Tensor) -> None:
        """Start sending a tensor of the parcel's layout; it is kept alive until it has left."""
        if parcel.layout.numel == 0:
            return
        message = parcel.message
        row = parcel.layout.wire(tensor.to(self._wire_device))
        work = self._world.start(row, message.source, message.target, parcel.index)
        queue = self._sending.setdefault(message.target, deque())
        queue.append((work, parcel, row))
        if len(queue) > _WINDOW:
            self._finish_oldest(queue)

    def recv(self, parcel: Parcel) -> None:
        """Post the receive of a parcel into a fresh tensor."""
        slot = parcel.layout.empty(self._wire_device)
        if parcel.layout.numel == 0:
            self._receiving[parcel.index] = (None, slot)
            return
        message = parcel.message
        work = self._world.start(parcel.layout.wire(slot), message.source, message.target, parcel.index)
        self._receiving[parcel.index] = (work, slot)

    def ready(self, parcel: Parcel) -> bool:
        """Waiting is all there is to do."""
        return True

    def wait(self, parcel: Parcel) -> torch.Tensor:
        """Return the tensor of a posted receive.

        Raises:
            RunError: The sender failed, is gone, or is too slow.
        """
        work, slot = self._receiving.pop(parcel.index)
        if work is not None:
            self._world.finish(work, slot, parcel.message.source, parcel.text)
        return slot if self._wire_device == self._device else slot.to(self._device)

    def drain(self) -> None:
        """Return when all that was sent has left.

        Raises:
            RunError: A receiver failed, is gone, or is too slow.
        """
        for queue in self._sending.values():
            while queue:
                self._finish_oldest(queue)

    def _finish_oldest(self, queue: deque[tuple[Any, Parcel, torch.Tensor]]) -> None:
        work, parcel, row = queue[0]
        self._world.finish(work, row, parcel.message.target, parcel.text)
        queue.popleft()

    def close(self) -> None:
        """Forget what is under way."""
        self._receiving.clear()
        self._sending.clear()


def _end(watch: Watch, board: Board) -> None:
    watch.close()
    board.leave()


def _default_has_nccl() -> bool:
    return "nccl" in f"{dist.get_backend()} {dist.get_backend_config()}"


def _local_cuda() -> torch.device:
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", index % max(1, torch.cuda.device_count()))
