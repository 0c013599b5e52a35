"""`pp.materialize`: give values to this rank's part of a model that was built on meta."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.checkpoints.initialising import Initialiser, initialise
from ppdsl.runtime.checkpoints.parts import ModelParts, subject_of
from ppdsl.runtime.checkpoints.safetensors_io import SafetensorsSource
from ppdsl.runtime.checkpoints.sources import MappingSource, Source, match, read
from ppdsl.runtime.checkpoints.subject import Subject
from ppdsl.runtime.replicas.shards import is_shard

__all__ = ["fill", "materialize"]

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]

_MOMENT = "the filling of the parameters"


def materialize(
    target: Any,
    weights: Weights | None = None,
    *,
    init: Initialiser | None = None,
    seed: int = 0,
    strict: bool = True,
) -> None:
    """Give values to this rank's parameters and buffers; those of other ranks stay as they are. All ranks call it.

    Without `weights` every module is initialised, children before parents: its own `reset_parameters()`, then
    `init(module)`. Every rank draws all values in this order from `seed`, on the CPU, and keeps its own, so they are
    those of one process, whatever the number of stages, and those of the plain model that is filled the same way. No
    rank holds more than its own part and one module at a time. A module's `reset_parameters()` may write to its
    children; `init` only to the module's own parameters and buffers.

    With `weights` each tensor is read under the plain model's name into the model's element type; of safetensors files
    only what this rank needs. A tied tensor needs one of its names. Buffers that no state dictionary holds
    (`persistent=False`) and that have no values are initialised as above.

    A tensor that had no memory is replaced by a new one: build optimizers afterwards.

    Args:
        target: A pipeline, or a plain model.
        weights: A state dictionary, a safetensors file, an index of such files, or a folder of them; None: initialise.
        init: Fills a module, given it.
        seed: Of the random numbers; the process's own are left alone.
        strict: Whether weights must have every name of the model and no other. Otherwise what they lack is
            initialised, and what the model lacks is left out.

    Raises:
        CallError: Names or shapes do not fit, something is left without values, a file cannot be read, or another rank
            could not go on.

    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(3, 2)
    >>> materialize(model, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    >>> model(torch.ones(1, 3)).tolist()
    [[3.0, 3.0]]
    """
    subject = subject_of(target)
    try:
        source = None if weights is None else _source_of(weights)
        if source is None and any(is_shard(slot.tensor) for slot in subject.slots):
            message = "The parameters are spread over replicas, and initial values are drawn for whole ones."
            raise CallError(Diagnostic("already-sharded", message, help="call pp.materialize before pp.fully_shard"))
        if source is None:
            initialise(subject, subject.slots, init, seed)
        else:
            fill(subject, source, init=init, seed=seed, strict=strict)
    except Exception as error:
        subject.world.refuse(_MOMENT, error)
        raise
    subject.world.agree(_MOMENT, {"the filling": f"{'weights' if weights is not None else 'initial'}, seed={seed}"})
    if isinstance(target, ModelParts):
        target.renew()


def fill(
    subject: Subject, source: Source, *, init: Initialiser | None = None, seed: int = 0, strict: bool = True
) -> None:
    """Fill this process's tensors from a source, and what no source can hold from initialisers.

    Args:
        subject: The model.
        source: The tensors.
        init: As for `materialize`.
        seed: As for `materialize`.
        strict: As for `materialize`.

    Raises:
        CallError: Names or shapes do not fit, something is left without values, or values cannot be read.
    """
    fitting = match(subject, source, strict=strict)
    if fitting.findings:
        raise CallError(*fitting.findings)
    # The same on every rank: whether a tensor is on meta may differ.
    if any(slot.tensor.is_meta and slot.mine for slot in fitting.absent):
        initialise(subject, fitting.absent, init, seed, only_empty=True)
    try:
        read(source, fitting.found)
    except (OSError, SafetensorError, RuntimeError) as error:
        message = f"The weights in {source.title} cannot be read: {error}"
        advice = "give tensors that have values, or the files as they were written"
        raise CallError(Diagnostic("unreadable-weights", message, help=advice)) from error


def _source_of(weights: Weights) -> Source:
    return MappingSource(weights) if isinstance(weights, Mapping) else SafetensorsSource(Path(weights))
