"""What a step is measured with: ppdsl, torch.distributed.pipelining, and the computation alone.

All run the same model on the same batch in the same processes, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import ppdsl as pp
from tests.benchmarks.workloads import Part, Workload

__all__ = ["TORCHS", "Ours", "Pure", "Torchs", "compare", "gather", "gradients_of"]

TORCHS: Mapping[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
"""Torch's class for a family."""

_ONE_STAGE = ("gpipe", "1f1b")

_TOLERANCE = 2e-4
"""Of the largest gradient: float32, and sums in another order."""

_Once = Callable[[Callable[[], None]], tuple[float, float]]
"""Computes a stage forward and backward, and waits for the device in the given way; returns the seconds of both."""


class Ours:
    """A pipeline of ppdsl.

    Args:
        work: What to run.
        schedule: The family.
        stages: How many stages.
        microbatches: In a step.
        ranks: How many processes; families with one stage for each get neighbours on one rank.
    """

    def __init__(self, work: Workload, schedule: str, stages: int, microbatches: int, ranks: int) -> None:
        self.model = work.model(stages)
        x, y = work.data(1)
        shared = schedule in _ONE_STAGE and stages > ranks
        began = time.process_time()
        self.pipe = pp.pipeline(
            self.model,
            (x,),
            targets=y,
            loss=work.loss,
            schedule=schedule,
            microbatches=microbatches,
            placement={stage: stage * ranks // stages for stage in range(stages)} if shared else None,
            devices=None if work.device.type == "cpu" else work.device,
            timeout=60.0,
        )
        self.build_seconds = time.process_time() - began
        self.batch = work.data(microbatches)
        self.parameters = dict(self.pipe.named_parameters())

    def step(self) -> None:
        """Run a training step."""
        x, y = self.batch
        self.pipe.step(x, targets=y)


class Torchs:
    """The same model, cut by hand for torch.distributed.pipelining.

    Args:
        work: A workload that is a chain.
        schedule: The family.
        stages: How many stages.
        microbatches: In a step.
        placement: Rank of each stage.
        rank: This process.
    """

    def __init__(
        self, work: Workload, schedule: str, stages: int, microbatches: int, placement: tuple[int, ...], rank: int
    ) -> None:
        self.model = work.model(stages)
        parts = work.parts(self.model)
        mine = [i for i, owner in enumerate(placement) if owner == rank]
        began = time.process_time()
        made = [pipelining.PipelineStage(parts[i].run, i, stages, work.device) for i in mine]  # type: ignore[arg-type]
        given: Any = made[0] if schedule in _ONE_STAGE else made
        self.schedule = TORCHS[schedule](given, microbatches, loss_fn=work.loss)
        self.build_seconds = time.process_time() - began
        self.batch = work.data(microbatches)
        self._first, self._last = 0 in mine, stages - 1 in mine
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        modules = [parts[i].run for i in mine]
        self.parameters = {
            names[id(p)]: p for module in modules if isinstance(module, nn.Module) for p in module.parameters()
        }

    def step(self) -> None:
        """Run a training step."""
        x, y = self.batch
        inputs = (x,) if self._first else ()
        losses: list[Tensor] | None = [] if self._last else None
        self.schedule.step(*inputs, target=y if self._last else None, losses=losses, return_outputs=False)


class Pure:
    """Forward and backward of this rank's stages on inputs that are there: no messages, no waiting, no order.

    Args:
        work: What to run.
        stages: How many stages.
        microbatches: In a step.
        placement: Rank of each stage.
        rank: This process.
    """

    def __init__(self, work: Workload, stages: int, microbatches: int, placement: tuple[int, ...], rank: int) -> None:
        self._microbatches = microbatches
        self._settle = work.settle
        self._parts: dict[int, _Once] = {}
        model = work.model(stages)
        x, y = work.data(1)
        values: dict[str, Tensor] = {"x": x}
        parts = work.parts(model)
        for part in parts:
            inputs = [values[name] for name in part.takes]
            given = part.run(*inputs)
            outputs = given if isinstance(given, tuple) else (given,)
            values |= {name: value.detach() for name, value in zip(part.gives, outputs, strict=True)}
            if placement[part.stage] == rank:
                loss = None if part is not parts[-1] else lambda output: work.loss(output, y)
                self._parts[part.stage] = _once(part, inputs, loss)

    def step(self) -> None:
        """Compute what this rank computes in a step."""
        self._run(lambda: None)

    def seconds(self) -> dict[int, list[tuple[float, float]]]:
        """Compute a step; return for each stage the seconds of each forward and backward."""
        return self._run(self._settle)

    def _run(self, settle: Callable[[], None]) -> dict[int, list[tuple[float, float]]]:
        found: dict[int, list[tuple[float, float]]] = {stage: [] for stage in self._parts}
        for _ in range(self._microbatches):
            for stage, once in self._parts.items():
                found[stage].append(once(settle))
        return found


def _once(part: Part, inputs: list[Tensor], loss: Callable[[Tensor], Tensor] | None) -> _Once:
    leaves = [
        value.detach().clone().requires_grad_(value.is_floating_point() and name != "x")
        for name, value in zip(part.takes, inputs, strict=True)
    ]
    seeds: list[Tensor] = []

    def once(settle: Callable[[], None]) -> tuple[float, float]:
        settle()
        start = time.perf_counter()
        given = part.run(*leaves)
        outputs = given if isinstance(given, tuple) else (given,)
        if loss is not None:
            outputs = (loss(outputs[0]),)
        settle()
        middle = time.perf_counter()
        if not seeds:
            seeds.extend(torch.ones_like(output) for output in outputs)
        torch.autograd.backward(outputs, seeds)
        settle()
        end = time.perf_counter()
        for leaf in leaves:
            leaf.grad = None
        return middle - start, end - middle

    return once


def gradients_of(work: Workload, stages: int, microbatches: int) -> dict[str, Tensor]:
    """Return the gradients of the whole model in one process, the batch in one piece."""
    model = work.model(stages)
    x, y = work.data(microbatches)
    work.loss(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str, gradients: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a gradient from the unsplit model's, as a share of its largest number.

    Raises:
        SystemExit: It is too large, or a gradient is missing.
    """
    worst = 0.0
    for key, got in gradients.items():
        error = float("inf") if got is None else float((got - wanted[key]).abs().max() / wanted[key].abs().max())
        worst = max(worst, error)
        if not error <= _TOLERANCE:
            raise SystemExit(f"wrong gradient of {key} under {name}: off by {error:.1e} of the largest")
    return worst


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of ranks; of this one where there is no other."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
