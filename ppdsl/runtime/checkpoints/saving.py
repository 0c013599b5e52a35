"""Write one checkpoint with several processes, so that a crash at any moment leaves the last good one as it was.

    directory/
      latest                names the checkpoint to load; replaced at last
      step-12/              complete: this name exists only when everything in it does
      .writing-step-24-1f/  under way, or left behind by a crash

The parts of torch.distributed.checkpoint (planner, writer) do the work; what processes have to tell each other goes
through ppdsl's own agreement or, in the background, through small files in the folder that is being written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.checkpoints.progress import CountingPlanner, Progress

__all__ = ["LATEST", "SIDECAR", "STATE", "WRITING", "Part", "choose_name", "local_plan"]

LATEST = "latest"
SIDECAR = "ppdsl.json"
STATE = "ppdsl.pt"
WRITING = ".writing-"


def choose_name(directory: Path, steps: int) -> str:
    """Return a name for a new checkpoint; one that exists is never written to.

    >>> choose_name(Path("nowhere"), 12)
    'step-12'
    """
    name, again = f"step-{steps}", 1
    while (directory / name).exists():
        again += 1
        name = f"step-{steps}-{again}"
    return name


def local_plan(
    state: Mapping[str, Any], progress: Progress | None = None, *, first: bool
) -> tuple[CountingPlanner, SavePlan]:
    """Return what this process wants to write of a state dictionary, with the planner that finds its tensors."""
    with warnings.catch_warnings():
        # The writer of torch 2.9 uses what torch itself calls deprecated, once in a process: here, not in a thread.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        torch.empty(0).storage()
    planner = CountingPlanner(progress)
    planner.set_up_planner(dict(state), is_coordinator=first)
    return planner, planner.create_local_plan()


@dataclass(frozen=True)
class Part:
    """One process's part of a checkpoint.

    Attributes:
        directory: Where checkpoints lie.
        name: Of this one.
        token: Tells this attempt from one that a crash left behind.
        rank: This process.
        planner: Finds this process's tensors.
        plans: What every process wants to write.
        sidecar: What is not a tensor, for rank 0 to write: plain data.
        state: The rest, for `torch.save`.
        keep: How many checkpoints stay; None: all.
        timeout: Seconds to wait for another process in the background.
    """

    directory: Path
    name: str
    token: str
    rank: int
    planner: CountingPlanner
    plans: Sequence[SavePlan]
    sidecar: Mapping[str, Any]
    state: Mapping[str, Any]
    keep: int | None
    timeout: float

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.directory / f"{WRITING}{self.name}-{self.token}"

    @property
    def final(self) -> Path:
        """What it is called when it is complete."""
        return self.directory / self.name

    def write(self) -> None:
        """Write this process's tensors, and a note that they are written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(self.folder)
        writer.set_up_storage_writer(self.rank == 0)
        plans, _ = self.planner.create_global_plan([*self.plans])
        plans = writer.prepare_global_plan(plans)
        results = writer.write_data(self.planner.finish_plan(plans[self.rank]), self.planner)
        results.wait()
        self.planner.finished()
        _write(self._note("done", self.rank), pickle.dumps(results.value()))

    def finish(self) -> None:
        """Make the checkpoint complete; only rank 0 does, when all processes have written."""
        writer = FileSystemWriter(self.folder)
        writer.set_up_storage_writer(True)
        _, metadata = self.planner.create_global_plan([*self.plans])
        notes = [self._note("done", rank) for rank in range(len(self.plans))]
        writer.finish(metadata, [pickle.loads(note.read_bytes()) for note in notes])
        buffer = io.BytesIO()
        torch.save(dict(self.state), buffer)
        _write(self.folder / STATE, buffer.getvalue())
        _write(self.folder / SIDECAR, (json.dumps(self.sidecar, indent=2) + "\n").encode())
        for note in notes:
            note.unlink()
        _sync(self.folder)
        self.folder.rename(self.final)
        _sync(self.directory)
        self._point()
        self._clear()

    def _point(self) -> None:
        beside = self.directory / f".{LATEST}.writing"
        _write(beside, f"{self.name}\n".encode())
        beside.replace(self.directory / LATEST)
        _sync(self.directory)

    def _clear(self) -> None:
        """Remove what crashes left behind, and checkpoints beyond those to keep, the oldest first."""
        for left in self.directory.glob(f"{WRITING}*"):
            shutil.rmtree(left, ignore_errors=True)
        if self.keep is None:
            return
        found = [path.parent for path in self.directory.glob(f"step-*/{SIDECAR}") if path.parent != self.final]
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        for old in found[: max(0, len(found) + 1 - self.keep)]:
            shutil.rmtree(old, ignore_errors=True)

    # ---------------------------------------------------------------- in the background

    def fail(self, error: Exception) -> None:
        """Tell the other processes that this one could not write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self._note("failed", self.rank), str(error).encode())

    def run(self) -> None:
        """Write, and wait until the checkpoint is complete, without a word to the ranks' main threads.

        Raises:
            RunError: Another process failed or is too slow.
        """
        try:
            self.write()
            if self.rank == 0:
                self._await([self._note("done", rank) for rank in range(len(self.plans))])
                self.finish()
            else:
                self._await([self.final])
        except RunError:
            raise
        except Exception as error:
            with contextlib.suppress(OSError):
                self.fail(error)
            raise

    def _await(self, paths: Sequence[Path]) -> None:
        end = time.monotonic() + self.timeout
        while not all(path.exists() for path in paths):
            for rank in range(len(self.plans)):
                note = self._note("failed", rank)
                if note.exists():
                    message = f"Rank {rank} could not write its part of {self.final}: {note.read_text()}"
                    raise RunError(Diagnostic("save-failed", message))
            if time.monotonic() > end:
                message = f"{self.final} was not complete within {self.timeout:g} seconds."
                raise RunError(Diagnostic("save-failed", message, help="another rank ended, or its disk is slow"))
            time.sleep(0.01)

    def _note(self, what: str, rank: int) -> Path:
        return self.folder / f".{what}-{rank}"


def _write(path: Path, data: bytes) -> None:
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _sync(folder: Path) -> None:
    """Make names that were written to a folder last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
