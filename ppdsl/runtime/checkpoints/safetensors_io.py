"""safetensors in and out: one file, or a folder of files with an index, as models are published."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.graph.ir import TensorMeta
from ppdsl.runtime.checkpoints.parts import subject_of
from ppdsl.runtime.checkpoints.subject import Slot, Subject
from ppdsl.runtime.layout import Layout
from ppdsl.runtime.processes.distributed import writes_shared
from ppdsl.runtime.replicas.shards import whole

__all__ = ["SafetensorsSource", "export_safetensors"]

_INDEX = "model.safetensors.index.json"
_MOMENT = "the export"


class SafetensorsSource:
    """One or several safetensors files; only headers are read until values are asked for.

    Args:
        path: A file, an index, or a folder with an index or with files.

    Raises:
        CallError: There is nothing there, or it cannot be read.
    """

    reads_shards = False

    def __init__(self, path: Path) -> None:
        self.title = str(path)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - an open file is no mapping
                        self._file_of[name] = file
                        self._shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                message = f"{file} cannot be read: {error}"
                raise CallError(Diagnostic("unreadable-weights", message)) from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes."""
        return self._shapes

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy values, one tensor after the other, and only those that are asked for."""
        for file in dict.fromkeys(self._file_of[name] for name in targets):
            with safe_open(file, framework="pt") as opened:
                for name, target in targets.items():
                    if self._file_of[name] == file:
                        target.copy_(opened.get_tensor(name))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        if not indices:
            files = sorted(path.glob("*.safetensors"))
            if not files:
                message = f"There is no safetensors file in {path}."
                raise CallError(Diagnostic("no-weights", message, help="load a checkpoint of pp.save with pp.load"))
            return files
        path = indices[0]
    if not path.exists():
        raise CallError(Diagnostic("no-weights", f"There is no {path}.", help="give a safetensors file or its folder"))
    if path.suffix != ".json":
        return [path]
    listed: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    files = [path.parent / name for name in dict.fromkeys(listed.values())]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        message = f"{path} lists files that are not there: {', '.join(absent)}."
        raise CallError(Diagnostic("no-weights", message, help="copy all files of the model"))
    return files


def export_safetensors(target: Any, path: str | os.PathLike[str]) -> Path:
    """Write a model's parameters and persistent buffers as safetensors, under the plain model's names.

    All ranks of a pipeline must call it. A tied tensor is written once, under its first name. What is there already is
    replaced only when all has been written.

    Args:
        target: A pipeline, or a plain model.
        path: A file that ends in `.safetensors`: rank 0 gets one tensor after the other and holds the whole model
            while it writes. Otherwise a folder: every rank writes its own part, rank 0 an index.

    Returns:
        The file, or the folder.

    Raises:
        CallError: A tensor has no values, the path cannot be written, or another rank could not go on.
        RunError: Another rank failed.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = export_safetensors(model, Path(folder) / "linear.safetensors")
    ...     sorted(SafetensorsSource(file).shapes())
    ['bias', 'weight']
    """
    subject = subject_of(target)
    path = Path(path)
    world = subject.world
    slots = [slot for slot in subject.slots if slot.persistent]
    try:
        empty = [slot.name for slot in slots if slot.saves and slot.tensor.is_meta]
        if empty:
            message = f"`{empty[0]}` is on meta: it has no values to write."
            raise CallError(Diagnostic("meta-parameter", message, help="fill it with pp.materialize or pp.load"))
    except CallError as error:
        world.refuse(_MOMENT, error)
        raise
    world.agree(_MOMENT, {"the path": str(path)})
    if path.suffix == ".safetensors":
        with world.step():
            tensors = _gather(subject, slots)
        _written(subject, [(path, tensors)] if subject.leads else [], {})
        return path
    held = {slot.name: _plain(slot.tensor) for slot in slots if world.holds(slot.first)}
    mine = held if writes_shared(world) else {}
    notes = [json.loads(note) for note in world.gather(json.dumps({name: _bytes(t) for name, t in mine.items()}))]
    files = [f"model-{i + 1:05}-of-{len(notes):05}.safetensors" for i in range(len(notes))]
    total = sum(size for note in notes for size in note.values())
    where = {name: file for file, note in zip(files, notes, strict=True) for name in note}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _written(subject, [(path / files[subject.rank], mine)] if mine else [], index if subject.leads else {}, path)
    return path


def _written(
    subject: Subject,
    files: list[tuple[Path, dict[str, torch.Tensor]]],
    index: Mapping[str, Any],
    folder: Path | None = None,
) -> None:
    """Write this process's files, then, when all ranks have, the index."""
    try:
        for file, tensors in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.writing")
            save_file(tensors, beside, metadata={"format": "pt"})
            beside.replace(file)
    except (OSError, SafetensorError) as error:
        refusal = CallError(Diagnostic("cannot-write", f"The weights cannot be written: {error}"))
        subject.world.refuse(_MOMENT, refusal)
        raise refusal from error
    subject.world.agree(_MOMENT, {})
    if index and folder is not None:
        beside = folder / f".{_INDEX}.writing"
        beside.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        beside.replace(folder / _INDEX)
    # The index is there when the call ends, on every rank.
    subject.world.agree(_MOMENT, {})


def _gather(subject: Subject, slots: list[Slot]) -> dict[str, torch.Tensor]:
    """Return all tensors on rank 0, one after the other; nothing elsewhere."""
    world, compiled = subject.world, subject.compiled
    if compiled is None:
        return {slot.name: _plain(slot.tensor) for slot in slots}
    tensors = {}
    for slot in slots:
        held = slot.tensor
        dtype = str(held.dtype).removeprefix("torch.")
        layout = Layout.of(TensorMeta(tuple(held.shape), dtype, tuple(held.stride())))
        value = world.share(
            _plain(held) if world.holds(slot.first) else None, slot.first, [0], layout, torch.device("cpu")
        )
        if value is not None:
            tensors[slot.name] = value.contiguous()
    return tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return whole(tensor).to("cpu").contiguous()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
