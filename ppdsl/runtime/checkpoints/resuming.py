"""`pp.load`: go on from a checkpoint, with another number of stages or ranks, or in the plain model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ppdsl.diagnostics import CallError, Diagnostic, PpdslError
from ppdsl.runtime.checkpoints.materialize import fill
from ppdsl.runtime.checkpoints.optimizer_state import load_state
from ppdsl.runtime.checkpoints.parts import ModelParts, subject_of
from ppdsl.runtime.checkpoints.saving import LATEST, SIDECAR, STATE, WRITING
from ppdsl.runtime.checkpoints.subject import Subject
from ppdsl.runtime.randomness import set_random_state
from ppdsl.runtime.replicas.shards import empty_like, is_shard

__all__ = ["Checkpoint", "load"]

_MOMENT = "the loading of the checkpoint"
_MODEL = "model."
_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded, beside tensors.

    Attributes:
        path: The checkpoint's folder.
        steps: The steps and evaluations until then.
        extra: What was saved with `extra=`.
        ranks: How many processes saved it.
        optimizer: The class of the optimizer whose state it holds; None: none was saved.
        spec: File and digest of the spec that divided the model, or None.
    """

    path: Path
    steps: int
    extra: Any
    ranks: int
    optimizer: str | None
    spec: Mapping[str, str] | None


def load(
    target: Any,
    directory: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    rng: bool = True,
) -> Checkpoint:
    """Load what `save` wrote into a pipeline or a plain model; all ranks must call it.

    Names decide: stages, ranks, placement, schedule and spec may be others than those that saved. Each rank reads only
    its own tensors. Parameters on meta get values too; build the optimizer afterwards then, and load again with it.

    Args:
        target: What `pipeline` returned, or a model.
        directory: A folder for checkpoints, of which the latest complete one is loaded, or one checkpoint's folder.
        optimizer: This rank's optimizer, to get its parameters' options and state; None: only the model is loaded.
        strict: Whether the checkpoint must have every name of the model and no other.
        rng: Whether random numbers go on as they would have: those of a pipeline's model at any number of ranks, unless
            it was built with another `seed=`; those that the process draws by itself rank by rank, and ranks beyond
            those that saved begin again at the first.

    Returns:
        What else was saved.

    Raises:
        CallError: There is no complete checkpoint, it does not fit the model or the optimizer, or another rank could
            not load it.

    >>> import tempfile
    >>> from ppdsl.runtime.checkpoints.checkpoint import save
    >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(model, folder, extra={"epoch": 3})
    ...     load(other, folder).extra
    {'epoch': 3}
    >>> torch.equal(model.weight, other.weight)
    True
    """
    subject = subject_of(target)
    try:
        path = _find(Path(directory).absolute())
        source = _CheckpointSource(path)
        sidecar = json.loads((path / SIDECAR).read_text(encoding="utf-8"))
        state = torch.load(path / STATE, weights_only=True)
        fill(subject, source, strict=strict)
        _load_extras(subject, source)
        if optimizer is not None:
            _load_optimizer(subject, source, optimizer, sidecar, state)
        found = Checkpoint(
            path, sidecar["steps"], state["extra"], sidecar["ranks"], sidecar["optimizer"], sidecar["spec"]
        )
    except Exception as error:
        failure = error if isinstance(error, PpdslError) else _unreadable(Path(directory), error)
        subject.world.refuse(_MOMENT, failure)
        if failure is error:
            raise
        raise failure from error
    subject.world.agree(_MOMENT, {"the checkpoint": f"{path.name} ({source.identity})"})
    if rng:
        saved = state["random"]
        set_random_state(saved[subject.rank % len(saved)])
        if isinstance(target, ModelParts) and state.get("keys") is not None:
            target.random.restore(state["keys"])
    if isinstance(target, ModelParts):
        target.renew(steps=found.steps)
    return found


def _unreadable(path: Path, error: Exception) -> CallError:
    message = f"The checkpoint in {path} cannot be read: {type(error).__name__}: {error}"
    return CallError(Diagnostic("unreadable-checkpoint", message, help="load another one of the same run"))


def _find(directory: Path) -> Path:
    """Return the folder of the checkpoint to load.

    Raises:
        CallError: There is none that is complete.
    """
    if not directory.is_dir():
        raise CallError(
            Diagnostic(
                "no-checkpoint", f"There is no folder {directory}.", help="give the folder that pp.save wrote to"
            )
        )
    pointer = directory / LATEST
    path = directory / pointer.read_text(encoding="utf-8").strip() if pointer.exists() else directory
    complete = sorted(found.parent.name for found in directory.glob(f"step-*/{SIDECAR}") if found.parent != path)
    advice = f"load one of these folders: {', '.join(complete)}" if complete else None
    if path == directory and not (path / SIDECAR).exists():
        begun = any(directory.glob(f"{WRITING}*"))
        what = "only one that was never completed" if begun else "none"
        message = f"There is no complete checkpoint in {directory}, {what}."
        raise CallError(Diagnostic("no-checkpoint", message, help=advice))
    absent = [name for name in (SIDECAR, STATE, ".metadata") if not (path / name).exists()]
    if absent:
        message = f"The checkpoint {path} is incomplete: it has no {', '.join(absent)}."
        raise CallError(Diagnostic("incomplete-checkpoint", message, help=advice))
    return path


class _CheckpointSource:
    """The model's tensors in a checkpoint, and whatever else it holds, by key."""

    reads_shards = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.title = f"the checkpoint {path}"
        self.metadata: Metadata = FileSystemReader(path).read_metadata()
        self._check_files()

    @property
    def identity(self) -> str:
        """What tells this checkpoint from another of its name."""
        return str(getattr(self.metadata.storage_meta, "save_id", ""))

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for info in (self.metadata.storage_data or {}).values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        for name, size in sizes.items():
            file = self.path / name
            there = file.stat().st_size if file.exists() else 0
            if there < size:
                message = f"The checkpoint {self.path} is incomplete: {name} has {there} of {size} bytes."
                raise CallError(Diagnostic("incomplete-checkpoint", message, help="load another one of its folder"))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the model's tensors."""
        entries = self.metadata.state_dict_metadata.items()
        return {
            key.removeprefix(_MODEL): tuple(entry.size)
            for key, entry in entries
            if key.startswith(_MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy the model's tensors."""
        self._load({_MODEL + name: target for name, target in targets.items()})

    def values(self, keys: Collection[str], patterns: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Return values of any kind.

        Args:
            keys: Their keys.
            patterns: Tensors by key: a value of the same shape is spread over processes as the tensor is.
        """
        state: dict[str, Any] = {}
        for key in keys:
            entry = self.metadata.state_dict_metadata[key]
            pattern = (patterns or {}).get(key)
            if isinstance(entry, TensorStorageMetadata):
                dtype = entry.properties.dtype
                if pattern is not None and is_shard(pattern) and pattern.shape == entry.size:
                    state[key] = empty_like(pattern, dtype)
                else:
                    state[key] = torch.empty(entry.size, dtype=dtype)
            else:
                state[key] = None
        return self._load(state)

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        if state:
            # Each rank reads what it needs by itself; afterwards ppdsl agrees on the outcome.
            reader = FileSystemReader(self.path)
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(state, self.metadata, is_coordinator=True)
            reader.set_up_storage_reader(self.metadata, True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
            reader.read_data(planner.finish_plan(plan), planner).wait()
        return state


def _load_extras(subject: Subject, source: _CheckpointSource) -> None:
    keys = source.metadata.state_dict_metadata
    extras = {_MODEL + name: key for name, key in subject.extras().items() if _MODEL + name in keys}
    values = source.values(extras)
    if values:
        subject.model.load_state_dict({extras[name]: value for name, value in values.items()}, strict=False)


def _load_optimizer(
    subject: Subject,
    source: _CheckpointSource,
    optimizer: torch.optim.Optimizer,
    sidecar: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    if sidecar["optimizer"] is None:
        message = f"The checkpoint {source.path} holds no optimizer's state."
        raise CallError(Diagnostic("no-optimizer-state", message, help="leave optimizer= out"))

    def read(pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], Any]:
        keys = {pair: f"{_OPTIMIZER}{pair[0]}.{pair[1]}" for pair in pairs}
        held = {slot.name: slot.tensor for slot in subject.slots}
        values = source.values(keys.values(), {key: held[name] for (name, _), key in keys.items()})
        return {pair: values[key] for pair, key in keys.items()}

    load_state(optimizer, subject, sidecar["optimizer"], state["groups"], sidecar["optimizer_keys"], read)
