"""`pp.save`: a pipeline's or a plain model's whole state, so that any other division of the model can go on from it."""

from __future__ import annotations

import atexit
import base64
import io
import os
import pickle
import secrets
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic, PpdslError, PpdslWarning, RunError
from ppdsl.runtime.checkpoints.optimizer_state import OptimizerState, merge_groups, state_of
from ppdsl.runtime.checkpoints.parts import ModelParts, subject_of
from ppdsl.runtime.checkpoints.progress import Progress
from ppdsl.runtime.checkpoints.saving import Part, choose_name, local_plan
from ppdsl.runtime.checkpoints.subject import Subject
from ppdsl.runtime.processes.distributed import writes_shared
from ppdsl.runtime.randomness import random_state

__all__ = ["Saving", "save"]

_VERSION = 1
_MOMENT = "the saving of the checkpoint"
_pending: dict[Path, Saving] = {}


class Saving:
    """A checkpoint that is being written; `save(..., asynchronous=True)` returns it.

    Training may go on at once: what is saved was copied before `save` returned. The next `save` to the same directory
    waits for this one first, so no error is lost.

    Args:
        part: This process's part.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._error: Exception | None = None
        self._started = False
        self._thread = threading.Thread(target=self._run, name=f"ppdsl saves {part.name}")

    def start(self) -> None:
        """Begin to write in the background; a process does not end before it has written."""
        self._started = True
        _pending[self._part.directory] = self
        self._thread.start()

    def _run(self) -> None:
        try:
            self._part.run()
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the checkpoint's folder when it is complete.

        Raises:
            RunError: It could not be written, here or on another rank.
        """
        if self._started:
            self._thread.join()
        if _pending.get(self._part.directory) is self:
            del _pending[self._part.directory]
        if self._error is not None:
            failure = RunError(*_failed(self._part, self._error).diagnostics)
            raise failure from self._error
        return self._part.final


def save(
    target: Any,
    directory: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> Saving:
    """Save a pipeline or a plain model so that `load` can go on at any number of stages; all ranks must call it.

    It writes a new folder `step-N` in `directory`, which all ranks share, and then lets the file `latest` name it. The
    folder gets its name when all in it is written, so a crash at any moment leaves the checkpoint before as it was.
    The folder is a checkpoint of torch.distributed.checkpoint with the plain model's names (`model.*`), each tensor
    once; ties under their first name; the optimizer's state by parameter name (`optimizer.*`). Beside it are the number
    of steps, the seed that a pipeline's random numbers follow from and how often it has drawn by it, the random number
    states of torch and Python on every rank, `extra`, and the spec for reference.

    A rank waits for the others to write their parts as long as the pipeline's `timeout` says. A plain model that lives
    in several processes is saved by one of them.

    Args:
        target: What `pipeline` returned, or a model.
        directory: A folder for checkpoints, made if it is not there.
        optimizer: This rank's optimizer, or None.
        extra: More to save, from rank 0: numbers, text, tensors, lists and dicts of them, such as a scheduler's
            `state_dict()`.
        keep: How many checkpoints stay, the newest ones; None: all.
        asynchronous: Whether to return as soon as all is copied, and write in the background.
        timeout: Seconds that the writing in the background waits for other ranks.
        progress: Called while this process writes, with the bytes written and the bytes in all; in the background from
            another thread. `ppdsl.report.saving.saving_bar()` draws them.

    Returns:
        The checkpoint; complete, unless it is written in the background: then `wait()` says when and whether it is.

    Raises:
        CallError: Something cannot be saved, or ranks disagree.
        RunError: Writing failed, here or on another rank.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder).wait().name
    'step-0'
    """
    subject = subject_of(target)
    directory = Path(directory).absolute()
    if (unfinished := _pending.get(directory)) is not None:
        try:
            unfinished.wait()
        except RunError as error:
            subject.world.refuse(_MOMENT, error)
            raise
    steps, keyed = (target.steps, target.random.state()) if isinstance(target, ModelParts) else (0, None)
    part = _prepare(
        subject, directory, optimizer, extra, steps, keyed, progress, keep=keep, copy=asynchronous, timeout=timeout
    )
    saving = Saving(part)
    if asynchronous:
        saving.start()
        return saving
    _act(part.write, subject, part)
    # Only now is every part there.
    _act(part.finish if part.rank == 0 else None, subject, part)
    return saving


def _act(action: Any, subject: Subject, part: Part) -> None:
    """Do this process's share and return when all have done theirs.

    Raises:
        RunError: It failed here or on another rank.
    """
    try:
        if action is not None:
            action()
    except Exception as error:
        failure = RunError(*_failed(part, error).diagnostics)
        subject.world.refuse(_MOMENT, failure)
        raise failure from error
    try:
        subject.world.agree(_MOMENT, {})
    except CallError as error:
        raise RunError(*error.diagnostics) from error


def _failed(part: Part, error: Exception) -> RunError:
    if isinstance(error, RunError):
        return error
    message = f"Rank {part.rank} could not write its part of {part.final}: {type(error).__name__}: {error}"
    return RunError(Diagnostic("save-failed", message, help="the checkpoint before is as it was"))


def _prepare(
    subject: Subject,
    directory: Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    steps: int,
    keyed: Mapping[str, int] | None,
    progress: Progress | None,
    *,
    keep: int | None,
    copy: bool,
    timeout: float,
) -> Part:
    """Look at all that is to be saved, and let every process know what the others will write."""
    world = subject.world
    try:
        _check(subject, directory, extra, keep)
        held = None if optimizer is None else state_of(optimizer, subject)
        state = _state(subject, held, copy=copy)
        planner, plan = local_plan(state, progress, first=subject.rank == 0)
    except Exception as error:
        world.refuse(_MOMENT, error)
        raise
    world.agree(_MOMENT, {"the directory": str(directory), "the number of steps": str(steps)})
    idle = held is None and not any(slot.parameter and slot.mine for slot in subject.slots)
    options = None if held is None else replace(held, values={})
    keys = {} if held is None else {name: list(values) for name, values in held.values.items()}
    note = {
        "name": choose_name(directory, steps), "token": secrets.token_hex(4), "plan": plan, "groups": options,
        "keys": keys, "random": random_state(), "idle": idle,
    }  # fmt: skip
    notes = [
        pickle.loads(base64.b64decode(text)) for text in world.gather(base64.b64encode(pickle.dumps(note)).decode())
    ]
    groups = merge_groups(_optimizers(notes))
    kind = next((note["groups"].kind for note in notes if note["groups"] is not None), None)
    sidecar = {
        "version": _VERSION,
        "model": type(subject.model).__name__,
        "steps": steps,
        "ranks": len(notes),
        "ties": {name: slot.name for slot in subject.slots if slot.persistent for name in slot.names[1:]},
        "optimizer": kind,
        "optimizer_keys": {name: keys for note in notes for name, keys in note["keys"].items()},
        "spec": _spec(subject),
        "torch": torch.__version__,
    }
    more = {"extra": extra, "groups": groups, "random": [note["random"] for note in notes], "keys": keyed}
    plans = [note["plan"] for note in notes]
    name, token = notes[0]["name"], notes[0]["token"]
    return Part(directory, name, token, subject.rank, planner, plans, sidecar, more, keep, timeout)


def _optimizers(notes: Sequence[Mapping[str, Any]]) -> list[OptimizerState]:
    """Return the optimizers of all ranks; a rank without parameters needs none.

    Raises:
        CallError: Ranks have optimizers of different classes, or only some have one.
    """
    states: list[OptimizerState | None] = [note["groups"] for note in notes]
    kinds = ["none" if state is None else state.kind for state in states]
    if len({kind for kind, note in zip(kinds, notes, strict=True) if not note["idle"]}) > 1:
        listed = " and ".join(f"{kind} on rank {rank}" for rank, kind in enumerate(kinds))
        message = f"Ranks disagree before {_MOMENT}: the optimizer is {listed}."
        raise CallError(Diagnostic("ranks-disagree", message, help="give optimizer= on every rank that has parameters"))
    return [state for state in states if state is not None]


def _check(subject: Subject, directory: Path, extra: Any, keep: int | None) -> None:
    empty = [slot.name for slot in subject.slots if slot.saves and slot.persistent and slot.tensor.is_meta]
    if empty:
        message = f"`{empty[0]}` is on meta: it has no values to save."
        raise CallError(Diagnostic("meta-parameter", message, help="fill it with pp.materialize or pp.load"))
    if keep is not None and keep < 1:
        message = f"keep is {keep}, but at least the checkpoint that is written has to stay."
        raise CallError(Diagnostic("wrong-keep", message, help="keep=None keeps all"))
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        message = f"extra= holds something that is no plain data: {str(error).splitlines()[0]}"
        advice = "give numbers, text, tensors, lists and dicts; of an object its state_dict()"
        raise CallError(Diagnostic("extra-not-plain", message, help=advice)) from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CallError(Diagnostic("cannot-write", f"{directory} cannot be made: {error}")) from error


def _state(subject: Subject, held: OptimizerState | None, *, copy: bool) -> dict[str, Any]:
    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to("cpu", copy=True) if copy else value.detach()

    own = subject.model.state_dict()
    saved = {f"model.{slot.name}": kept(slot.tensor) for slot in subject.slots if slot.saves and slot.persistent}
    if writes_shared(subject.world):
        saved |= {f"model.{name}": own[key] for name, key in subject.extras().items()}
    values = {} if held is None else held.values
    return saved | {f"optimizer.{name}.{key}": kept(v) for name, state in values.items() for key, v in state.items()}


def _spec(subject: Subject) -> Mapping[str, Any] | None:
    """Return which spec divided the model; another one may divide it when it is loaded."""
    partition = subject.spec
    if partition is None:
        return None
    return {"file": partition.file, "digest": partition.source_digest}


def _report() -> None:
    """Say what failed in the background and was waited for by nobody."""
    for saving in list(_pending.values()):
        try:
            saving.wait()
        except PpdslError as error:
            warnings.warn(PpdslWarning(str(error)), stacklevel=1)


atexit.register(_report)
