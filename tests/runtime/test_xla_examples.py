"""Every example and every example spec trains on four XLA devices as in the plain loop on the CPU.

Compared in two steps under GPipe, 1F1B, interleaved 1F1B and ZBV: loss, outputs, every gradient, parameter and buffer.
`07_elastic.py` is about processes that die and a torchrun that starts others; what trains in it, its model under its
spec, is compared here as well. `tpu_llama.py` is for XLA devices alone and has tests of its own.
"""

from __future__ import annotations

import gc
import os
import runpy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ppdsl as pp
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.spec.load import load_spec
from ppdsl.spec.partition import Partition
from tests import example_specs
from tests.example_specs import FOLDER, LANGUAGE, VISION, spec_of

pytestmark = pytest.mark.xla

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
DEVICES, STEPS, RATE = 4, 2, 0.01
CLOSE = 1e-5
"""Relative to the largest number of a tensor."""
ROUNDED = CLOSE / 4
"""What rounding to float32 may do to the plain loop; where it does more, both are compared in float64."""
NOTHING = 1e-12
"""A gradient of this share of the largest one, in float64, is zero but for rounding: a key's bias before a softmax."""


@pytest.fixture(autouse=True, scope="module")
def _started() -> Iterator[None]:
    """Start torch_xla before the first backward of this process, with a compiler that does not try hard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 " + os.environ.get("XLA_FLAGS", ""))
        assert xla_adapter.device_count() == DEVICES
        yield


@dataclass(frozen=True)
class Case:
    """A model that trains.

    Attributes:
        make: Returns what `pp.pipeline` takes, for so many rows.
        spec: What divides it, or None where the model is marked.
        options: What else the pipeline is told.
        rows: Of a micro-batch.
        microbatches: In a step.
    """

    make: Callable[[int], dict[str, Any]]
    spec: Partition | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    microbatches: int = 4


def example(stem: str) -> Callable[[int], dict[str, Any]]:
    return lambda rows: runpy.run_path(str(EXAMPLES / f"{stem}.py"))["make"](rows=rows)


def read(spec: Path) -> Partition:
    """Return a spec without what it expects of its own schedule, placement and size of the model."""
    return replace(load_spec(spec), expectations=())


def narrow(name: str) -> Case:
    """Return a vision model in small, with the parts that its spec names."""

    def build() -> nn.Module:
        import_module("tests.zoo.vision")  # lets torchvision import where its compiled part does not load
        import timm.models as zoo
        from torchvision.models import DenseNet

        match name:
            case "resnet50":
                return zoo.resnet.ResNet(zoo.resnet.Bottleneck, (1, 1, 1, 1), 5, channels=(8, 8, 16, 16), stem_width=8)
            case "convnext":
                return zoo.convnext.ConvNeXt(num_classes=5, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
            case "densenet":
                return DenseNet(4, (2, 2, 2, 2), 8, bn_size=2, num_classes=5)
        kinds = ["BOTTLENECK", "BASIC", "BASIC", "BASIC"]
        parts = {
            f"stage{number}": {
                "num_modules": 1, "num_branches": number, "block_type": kind, "num_blocks": (1,) * number,
                "num_channels": (4, 4, 8, 8)[:number], "fuse_method": "SUM",
            }
            for number, kind in enumerate(kinds, 1)
        }  # fmt: skip
        model = zoo.hrnet.HighResolutionNet({"stem_width": 8, **parts}, num_classes=5)
        # Its own head has thousands of channels, whatever the rest has.
        model.incre_modules = nn.ModuleList(nn.Conv2d(channels, 8, 1) for channels in (4, 4, 8, 8))
        model.downsamp_modules = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(3))
        model.final_layer, model.classifier = nn.Conv2d(8, 16, 1), nn.Linear(16, 5)
        return model

    return Case(lambda rows: runpy.run_path(str(FOLDER / "vision.py"))["made"](build, rows), read(spec_of(name)))


CASES = {
    **{path.stem: Case(example(path.stem)) for path in sorted(EXAMPLES.glob("0[1-6]_*.py"))},
    "07_elastic under its spec": Case(example("07_elastic"), read(EXAMPLES / "07_elastic.ppspec")),
    **{
        name: Case(lambda rows, name=name: example_specs.make(name, rows=rows), read(spec_of(name)))
        for name in LANGUAGE
    },
    **{name: narrow(name) for name in VISION},
}
# The routers' own loss is a number of each micro-batch, of which the last one's is given back. Which rows an expert
# gets depends on numbers, so that each micro-batch has programs of its own.
CASES["mixtral"] = replace(CASES["mixtral"], options={"batch_axis": {"output['aux_loss']": None}}, microbatches=2)


# ---------------------------------------------------------------- the plain loop


@dataclass(frozen=True)
class Step:
    """What a step left, on the CPU."""

    loss: torch.Tensor
    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    def of(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(of, tree)


def made(case: Case, dtype: torch.dtype, microbatches: int = 1) -> dict[str, Any]:
    """Return the model with that many micro-batches of arguments."""
    call = case.make(case.rows * microbatches)
    call["model"] = call["model"].to(dtype)
    return {key: cast(value, dtype) if key in ("args", "kwargs", "targets") else value for key, value in call.items()}


def cut(tree: Any, start: int, rows: int) -> Any:
    return pytree.tree_map(lambda t: t[start : start + rows] if isinstance(t, torch.Tensor) and t.dim() else t, tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach().cpu() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def left(model: nn.Module, loss: torch.Tensor, outputs: list[torch.Tensor]) -> Step:
    gradients = {n: None if p.grad is None else p.grad.cpu().clone() for n, p in model.named_parameters()}
    named = [*model.named_parameters(), *model.named_buffers()]
    return Step(loss.detach().cpu(), outputs, gradients, {n: t.detach().cpu().clone() for n, t in named})


def plain(case: Case, dtype: torch.dtype) -> list[Step]:
    rows, microbatches = case.rows, case.microbatches
    call = made(case, dtype, microbatches)
    model = call["model"]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses, outputs = [], []
        for start in range(0, rows * microbatches, rows):
            output = model(*cut(call.get("args", ()), start, rows), **cut(call.get("kwargs", {}), start, rows))
            targets = call.get("targets", ())
            targets = cut(targets if isinstance(targets, tuple) else (targets,), start, rows)
            losses.append(call["loss"](output, *targets) if "loss" in call else output.loss)
            (losses[-1] / microbatches).backward()
            outputs.append(tensors(output))
        loss = torch.stack([loss.detach() for loss in losses]).mean()
        steps.append(left(model, loss, [joined(parts, loss) for parts in zip(*outputs, strict=True)]))
        optimizer.step()
    return steps


def joined(parts: tuple[torch.Tensor, ...], loss: torch.Tensor) -> torch.Tensor:
    """Put the micro-batches of an output together: rows behind rows; the loss is that of the step."""
    if parts[0].dim():
        return torch.cat(parts)
    return loss if torch.stack(parts).mean().to(loss.dtype) == loss else parts[-1]


@dataclass(frozen=True)
class Reference:
    """The plain loop's steps.

    Attributes:
        dtype: float32, or float64 where the plain loop in float32 is already far from itself in float64.
        steps: In that type.
        zero: Parameters whose gradient is zero but for rounding.
    """

    dtype: torch.dtype
    steps: list[Step]
    zero: frozenset[str]


@cache
def reference(name: str) -> Reference:
    case = CASES[name]
    exact = plain(case, torch.float64)
    sizes = {n: float(g.abs().max()) for n, g in exact[0].gradients.items() if g is not None}
    zero = frozenset(n for n, size in sizes.items() if size <= NOTHING * max(sizes.values()))
    steps = plain(case, torch.float32)
    if any(differences(one, two, zero, ROUNDED) for one, two in zip(steps, exact, strict=True)):
        return Reference(torch.float64, exact, zero)
    return Reference(torch.float32, steps, zero)


def differences(ours: Step, theirs: Step, zero: frozenset[str], close: float = CLOSE) -> list[str]:
    """Return in words what of two steps differs."""
    found = []
    largest = max(float(gradient.abs().max()) for gradient in theirs.gradients.values() if gradient is not None)

    def compare(what: str, one: torch.Tensor, other: torch.Tensor, scale: float = 0.0) -> None:
        if one.shape != other.shape:
            found.append(f"{what} is {list(one.shape)}, not {list(other.shape)}")
        elif one.numel():
            apart, scale = float((one.double() - other.double()).abs().max()), scale or float(other.abs().max())
            if not apart <= close * scale:
                found.append(f"{what} is off by {apart:.3g} of {scale:.3g}")

    compare("loss", ours.loss, theirs.loss)
    for number, (one, other) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        compare(f"output {number}", one, other)
    if ours.gradients.keys() != theirs.gradients.keys() or ours.state.keys() != theirs.state.keys():
        found.append("other names")
    for name, other in theirs.gradients.items():
        one = ours.gradients[name]
        if one is None or other is None:
            found += [] if one is other else [f"gradient of {name} is None in one of them"]
        else:
            compare(f"gradient of {name}", one, other, largest if name in zero else 0.0)
    for name, other in theirs.state.items():
        compare(name, ours.state[name], other, max(float(other.abs().max()), RATE * largest))
    return found


# ---------------------------------------------------------------- on XLA devices


def placement_of(name: str, schedule: str, keys: tuple[int | str, ...]) -> dict[int | str, int] | None:
    """Return the ranks of the stages; None: as the spec says. Skips what the schedule is not for."""
    count = len(keys)
    if schedule in ("gpipe", "1f1b"):
        return None if CASES[name].spec else {key: number % DEVICES for number, key in enumerate(keys)}
    ranks = count // 2
    if count % 2 or not 1 < ranks <= DEVICES:
        pytest.skip(f"{schedule} has two stages on each of 2 to {DEVICES} ranks, and {name} has {count} stages")
    back = range(ranks - 1, -1, -1) if schedule == "zbv" else range(ranks)
    return dict(zip(keys, (*range(ranks), *back), strict=True))


def test_no_example_is_left_out() -> None:
    examples = {path.stem for path in EXAMPLES.glob("*.py")}
    assert examples - CASES.keys() == {"07_elastic", "tpu_llama"}
    assert {path.stem for path in FOLDER.glob("*.ppspec")} <= CASES.keys()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_those_of_the_plain_loop(name: str, schedule: str) -> None:
    case = CASES[name]
    if case.spec is not None and name in (*LANGUAGE, *VISION):
        for package in ("transformers",) if name in LANGUAGE else ("timm", "torchvision"):
            pytest.importorskip(package)
    gc.collect()
    keys = keys_of(name)
    placement = placement_of(name, schedule, keys)
    theirs = reference(name)
    pipe, call = pipeline_of(case, theirs.dtype, schedule, placement)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    for number, expected in enumerate(theirs.steps):
        optimizer.zero_grad()
        given, named = call.get("args", ()), call.get("kwargs", {})
        result = quietly(pipe.step, *given, targets=call.get("targets"), outputs="all", **named)
        found = left(call["model"], result.loss, tensors(result.outputs))
        assert differences(found, expected, theirs.zero) == [], f"step {number}"
        optimizer.step()
    pipe.close()


def quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PpdslWarning)
        return call(*args, **kwargs)


def pipeline_of(
    case: Case, dtype: torch.dtype, schedule: str, placement: dict[int | str, int] | None, devices: str | None = "xla"
) -> tuple[pp.Pipeline, dict[str, Any]]:
    """Return a pipeline, and a whole batch for it with its model."""
    call = made(case, dtype)
    pipe = quietly(
        pp.pipeline, **call, **case.options, spec=case.spec, schedule=schedule, placement=placement, devices=devices,
        microbatches=case.microbatches,
    )  # fmt: skip
    return pipe, made(case, dtype, case.microbatches) | {"model": call["model"]}


@cache
def keys_of(name: str) -> tuple[int | str, ...]:
    """Return the keys of the stages, in order."""
    case = CASES[name]
    if case.spec is None:
        call = made(case, torch.float32)
        stages = quietly(pp.record, call["model"], *call.get("args", ()), **call.get("kwargs", {})).stages
    else:
        pipe, _ = pipeline_of(case, torch.float32, "gpipe", None, None)
        stages = pipe.graph.stages
    return tuple(dict.fromkeys(stage.key for stage in stages))
