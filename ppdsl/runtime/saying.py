"""The auxiliary losses and metrics of a step, from the stages of all ranks to every rank."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, MarkError, PpdslWarning, Severity, render_plain
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.layout import dtype_of
from ppdsl.runtime.moving import fetched
from ppdsl.runtime.processes.distributed import of_own_pipeline, replica_of
from ppdsl.runtime.stages.hearing import Metric
from ppdsl.runtime.world import World

__all__ = ["Said", "share_said"]

Value = tuple[float, int]
"""What several values of a metric come to, and how many they were."""


Pass = tuple[int, int]
"""One pass through the model: replica and micro-batch."""


@dataclass(frozen=True)
class Said:
    """What all stages said in a step; the same on every rank.

    Attributes:
        losses: For each micro-batch what its auxiliary losses add to its loss; empty when there are none.
        metrics: The combined value of each metric, on the CPU.
    """

    losses: tuple[torch.Tensor, ...] = ()
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def share_said(compiled: Compiled, weights: Sequence[float], world: World) -> Said:
    """Return what all stages said.

    Args:
        compiled: What ran.
        weights: What each micro-batch's loss counts.
        world: The ranks.

    Raises:
        MarkError: Stages report one metric in several ways.
    """
    if not any(stage.says for stage in compiled.graph.stages):
        return Said()
    notes = [_note(compiled, stage) for stage in sorted(compiled.states)]
    mine = {"replica": replica_of(world), "weights": list(weights), "stages": notes}
    texts = world.gather(json.dumps(mine))
    own = [json.loads(text) for text in of_own_pipeline(texts, world)]
    stages = sorted((note for text in own for note in text["stages"]), key=lambda note: note["stage"])
    metrics = _combined([json.loads(text) for text in texts])
    return Said(_losses(compiled, stages, len(weights)), metrics)


# -------------------------------------------------------------------- this process's part


def _note(compiled: Compiled, stage: int) -> dict[str, Any]:
    """Return what a stage said, as JSON can carry it."""
    losses: list[float | None] = []
    metrics: dict[str, dict[str, Any]] = {}
    dtypes: list[str] = []
    for number, (loss, said) in enumerate(compiled.said(stage)):
        found = [] if loss is None else fetched([loss])
        losses.append(float(found[0]) if found else None)
        dtypes += [_name(one.dtype) for one in found]
        values = fetched([metric.value for metric in said])
        for metric, value in zip(said, values, strict=True):
            _put(metrics, metric, value, number)
    return {"stage": stage, "losses": losses, "dtypes": dtypes, "metrics": metrics}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _put(metrics: dict[str, dict[str, Any]], metric: Metric, value: torch.Tensor, microbatch: int) -> None:
    entry = metrics.setdefault(metric.name, {"reduce": metric.reduce, "dtype": _name(value.dtype), "values": {}})
    _check_reduce(metric.name, entry["reduce"], metric.reduce)
    values, key = entry["values"], str(microbatch)
    values[key] = _joined(metric.reduce, [*([values[key]] if key in values else []), (float(value), 1)])


# -------------------------------------------------------------------- all together


def _losses(compiled: Compiled, stages: Sequence[Mapping[str, Any]], count: int) -> tuple[torch.Tensor, ...]:
    dtypes = [dtype_of(name) for note in stages for name in note["dtypes"]]
    if not dtypes:
        return ()
    dtype = compiled.loss_dtype
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    totals = []
    for number in range(count):
        total = torch.zeros((), dtype=dtype)
        for note in stages:
            part = note["losses"][number]
            total = total if part is None else total + torch.tensor(part, dtype=dtype)
        totals.append(total)
    _warn_of_odd_losses(compiled, stages)
    return tuple(totals)


def _warn_of_odd_losses(compiled: Compiled, stages: Sequence[Mapping[str, Any]]) -> None:
    for note in stages:
        odd = [number for number, loss in enumerate(note["losses"]) if loss is not None and not math.isfinite(loss)]
        if odd:
            label = compiled.graph.stages[note["stage"]].label
            numbers = ", ".join(map(str, odd))
            message = f"What stage {label} adds to the loss is not finite (micro-batches: {numbers})."
            diagnostic = Diagnostic("loss-not-finite", message, severity=Severity.WARNING)
            warnings.warn(PpdslWarning(render_plain([diagnostic])), stacklevel=2)


def _combined(processes: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return each metric's value over all stages, micro-batches and replicas."""
    shares: dict[Pass, float] = {}
    notes: dict[tuple[int, int], Mapping[str, Any]] = {}
    for process in processes:
        for note in process["stages"]:
            # Tensor-parallel peers say the same.
            notes.setdefault((note["stage"], process["replica"]), note)
        shares.update(((process["replica"], number), weight) for number, weight in enumerate(process["weights"]))
    values: dict[str, dict[Pass, list[Value]]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for (_, replica), note in sorted(notes.items(), key=lambda entry: entry[0]):
        for name, entry in note["metrics"].items():
            kind = kinds.setdefault(name, (entry["reduce"], entry["dtype"]))
            _check_reduce(name, kind[0], entry["reduce"])
            for number, value in entry["values"].items():
                values.setdefault(name, {}).setdefault((replica, int(number)), []).append((value[0], value[1]))
    return {name: _value(*kinds[name], found, shares) for name, found in values.items()}


def _value(
    reduce: str, dtype: str, found: Mapping[Pass, Sequence[Value]], shares: Mapping[Pass, float]
) -> torch.Tensor:
    """Return one metric's value over all micro-batches."""
    each = {key: _joined(reduce, values) for key, values in found.items()}
    kind = dtype_of(dtype)
    if reduce == "mean":
        total = math.fsum(shares[key] for key in each)
        weights = {key: shares[key] / total if total else 1.0 / len(each) for key in each}
        result = sum(weights[key] * value / count for key, (value, count) in each.items() if weights[key])
        return torch.tensor(result, dtype=kind if kind.is_floating_point else torch.get_default_dtype())
    value = _joined(reduce, list(each.values()))[0]
    if kind.is_floating_point:
        return torch.tensor(value, dtype=kind)
    return torch.tensor(int(value), dtype=torch.int64 if kind is torch.bool else kind)


def _joined(reduce: str, values: Sequence[Value]) -> Value:
    numbers = [value for value, _ in values]
    count = sum(count for _, count in values)
    if reduce in ("max", "min"):
        odd = [number for number in numbers if math.isnan(number)]
        return (odd[0] if odd else max(numbers) if reduce == "max" else min(numbers)), count
    return sum(numbers), count


def _check_reduce(name: str, one: str, other: str) -> None:
    if one != other:
        message = f"Metric {name!r} is combined by {one!r} in one place and by {other!r} in another."
        raise MarkError(Diagnostic("bad-metric", message, help="use one of them, or another name"))
