"""What the XLA runtime counts, chooses and refuses."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.diagnostics import CallError, RunError
from ppdsl.plan.messages import Compute
from ppdsl.plan.ticks import ticks_of
from ppdsl.runtime.xla import adapter as xla_adapter
from ppdsl.runtime.xla import choice as xla_choice

PACKAGE = Path(pp.__file__).parent
WIDTH, MICROBATCHES = 4, 4

on_xla = pytest.mark.xla


class Chain(nn.Module):
    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with pp.stage(number):
                x = self.layer(number, layer, x)
        return x

    def layer(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def pipeline_of(model: nn.Module, **options: Any) -> pp.Pipeline:
    options = {"devices": "xla", "loss": mean_square, "targets": (), "microbatches": MICROBATCHES} | options
    return pp.pipeline(model, (torch.ones(2, WIDTH),), **options)


@pytest.fixture
def started() -> int:
    """Start torch_xla before the first backward of this process; returns the number of devices."""
    return xla_adapter.device_count()


# ---------------------------------------------------------------- without torch_xla


def imports_torch_xla(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] in ("torch_xla", "_XLAC") for name in names):
            return True
    return False


def test_one_module_alone_imports_torch_xla() -> None:
    found = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")) if imports_torch_xla(path)]
    assert found == ["runtime/xla/adapter.py"]


def test_the_runtime_loads_without_torch_xla() -> None:
    code = "import sys; sys.modules['torch_xla'] = None; import ppdsl.runtime.pipeline, ppdsl.runtime.xla.adapter"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("versions", "device", "code", "says"),
    [
        (("2.9.0", ""), "CPU", "xla-missing", "torch_xla is not installed"),
        (("2.13.0+cpu", "2.9.0"), "CPU", "xla-versions", "built for torch 2.9, and torch is 2.13.0+cpu"),
        (("2.9.0", "2.9.0"), None, "xla-no-device", "PJRT_DEVICE is not set"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, versions: tuple[str, str], device: str | None, code: str, says: str
) -> None:
    monkeypatch.setattr(xla_adapter, "versions", lambda: versions)
    monkeypatch.setattr(xla_adapter, "is_installed", lambda: bool(versions[1]))
    if device is None:
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
    else:
        monkeypatch.setenv("PJRT_DEVICE", device)
    with pytest.raises(CallError, match=re.escape(says)) as caught:
        pipeline_of(Chain())
    assert caught.value.diagnostics[0].code == code
    assert caught.value.diagnostics[0].help


def test_a_transport_is_for_xla_devices_only() -> None:
    with pytest.raises(CallError, match="do not run on XLA devices"):
        pipeline_of(Chain(), devices=None, transport="host")


def test_ticks_run_the_whole_plan_in_an_order_that_never_waits() -> None:
    for schedule in ("1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"):
        placement = {number: number % 2 for number in range(4)} if schedule == "interleaved_1f1b" else None
        plan = pipeline_of(Chain(), devices=None, schedule=schedule, placement=placement).plan
        turns = [turn for tick in ticks_of(plan) for turn in tick]
        expected = Counter(step.action for row in plan.rows for step in row if isinstance(step, Compute))
        assert Counter(turn.action for turn in turns) == expected
        assert all(len({turn.rank for turn in tick}) == len(tick) for tick in ticks_of(plan))


# ---------------------------------------------------------------- counted


@on_xla
def test_a_steady_step_starts_what_the_plan_says_and_copies_nothing_between_devices(started: int) -> None:
    model = Chain()
    pipe = pipeline_of(model, transport="permute", schedule="1f1b")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2 * MICROBATCHES, WIDTH)
    for _ in range(2):
        pipe.step(x)
        optimizer.step()
        optimizer.zero_grad()
    before = xla_adapter.counters()
    pipe.step(x)
    step = xla_adapter.counters().since(before)
    actions = sum(isinstance(action, Compute) for row in pipe.plan.rows for action in row)
    # In each tick with messages one program moves all of them, as each rank sends and receives at most once: the pairs
    # of both directions between equal tensors are one round, or two where a rank would send twice.
    kinds = {(0, 1), (1, 2), (2, 3)}, {(1, 0), (2, 1), (3, 2)}
    moves = sum(
        any((m.source, m.target) in pairs for turn in tick for m in turn.needs)
        for tick in ticks_of(pipe.plan)
        for pairs in _rounds([*kinds[0], *kinds[1]])
    )
    making = 4  # new gradients, as zero_grad() has taken the old ones away
    assert step.compilations == 0
    assert step.launches == actions + moves * started + making
    assert step.downloads == MICROBATCHES  # the losses
    assert step.uploads == 2 * MICROBATCHES  # inputs, and the weights of the losses
    before = xla_adapter.counters()
    optimizer.step()
    assert xla_adapter.counters().since(before) == xla_adapter.Counters(4, 0, 0, 0)


def _rounds(pairs: list[tuple[int, int]]) -> list[set[tuple[int, int]]]:
    from ppdsl.graph.shapes import chain_graph
    from ppdsl.plan.lowering import lower
    from ppdsl.runtime.transport import make_parcels
    from ppdsl.runtime.xla.transport import PermuteCarrier
    from ppdsl.schedule.registry import build_schedule

    graph = chain_graph(4)
    plan = lower(build_schedule("1f1b", graph, (0, 1, 2, 3), microbatches=MICROBATCHES), graph)
    carrier = PermuteCarrier(xla_adapter.device_of, 4)
    carrier.plan(make_parcels(plan, [graph] * MICROBATCHES).values())
    ((_, rounds),) = carrier.rounds().items()
    assert sorted(pair for found in rounds for pair in found) == sorted(pairs)
    return [set(found) for found in rounds]


@on_xla
def test_the_driver_says_which_transport_it_took_and_why(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    explained = pipeline_of(Chain()).explain()
    assert explained["transport"] == {"name": "permute", "reason": "Its test at the start gave the right values."}
    assert pipeline_of(Chain(), transport="host").explain()["transport"]["name"] == "host"
    monkeypatch.setenv("XLA_THREAD_POOL_SIZE", "2")
    explained = pipeline_of(Chain()).explain()
    assert explained["transport"]["name"] == "host"
    assert "XLA_THREAD_POOL_SIZE=4" in explained["transport"]["reason"]
    with pytest.raises(CallError, match="2 threads for 4 devices"):
        pipeline_of(Chain(), transport="permute")
    with pytest.raises(CallError, match="no transport 'pigeon'"):
        pipeline_of(Chain(), transport="pigeon")


@on_xla
def test_a_test_of_permutation_that_brings_wrong_values_leads_to_the_host(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_adapter, "permute", lambda row, _: row)
    xla_choice.tested.cache_clear()
    try:
        explained = pipeline_of(Chain()).explain()
    finally:
        xla_choice.tested.cache_clear()
    assert explained["transport"]["name"] == "host"
    assert "[0, 1, 2, 3] instead of [3, 0, 1, 2]" in explained["transport"]["reason"]


# ---------------------------------------------------------------- refused, or said


@on_xla
def test_more_ranks_than_devices_are_refused(started: int) -> None:
    with pytest.raises(CallError, match=r"has 5 ranks, but this process has 4 XLA devices"):
        pipeline_of(Chain(5), placement={number: number for number in range(5)})


class Stray(Chain):
    """Uses a tensor that no module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Scaled()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = [torch.full((WIDTH, WIDTH), 2.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.factor[0]


@on_xla
@pytest.mark.parametrize("where", ["cpu", "xla:0"])
def test_an_operand_on_a_wrong_device_is_named_before_anything_starts(started: int, where: str) -> None:
    model = Stray()
    pipe = pipeline_of(model)
    scaled: Any = model.layers[2]
    scaled.factor[0] = scaled.factor[0].to(where)
    pattern = rf"stage 2 runs on xla:2, but `mm` gets a float32\[4, 4\] tensor on {where}"
    with pytest.raises(RunError, match=pattern) as caught:
        pipe.step(torch.ones(2 * MICROBATCHES, WIDTH))
    assert caught.value.diagnostics[0].code == "xla-wrong-device"


class Sorted(Chain):
    def layer(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        return torch.special.bessel_j0(x.detach()) + x if number == 1 else x


@on_xla
def test_an_operation_that_runs_on_the_cpu_is_named_with_its_stage(started: int) -> None:
    pipe = pipeline_of(Sorted())
    with pytest.warns(pp.PpdslWarning, match=r"(?s)forward of stage 1 runs on the CPU.*`aten::special_bessel_j0"):
        pipe.step(torch.ones(2 * MICROBATCHES, WIDTH))
    assert any("special_bessel_j0" in text for text in pipe.explain()["xla"])


class Counting(Chain):
    """A Python number that is another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Growing()


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x[:, : 1 + self.calls % 2].sum(1, keepdim=True)


@on_xla
def test_a_program_that_is_compiled_again_is_reported_with_its_stage(started: int) -> None:
    model = Counting()
    pipe = pipeline_of(model)
    growing: Any = model.layers[1]
    for _ in range(3):
        pipe.step(torch.ones(2 * MICROBATCHES, WIDTH))
    growing.calls = 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe.step(torch.ones(2 * MICROBATCHES, WIDTH))
    texts = [str(one.message) for one in said if isinstance(one.message, pp.PpdslWarning)]
    assert "The forward of stage 1 was compiled again in step 4. Likely cause: a Python number" in texts[0]
    assert len(texts) == 2, "forward and backward, each said once"


@on_xla
def test_a_weight_is_kept_for_backward_as_itself(started: int) -> None:
    from ppdsl.runtime.xla import stage as xla_stage

    layer = nn.Linear(3, 5).to("xla:1")
    kept: list[Any] = []

    def pack(tensor: torch.Tensor) -> Any:
        kept.append(xla_stage.pack(tensor))
        return kept[-1]

    x = torch.ones(2, 3, device="xla:1", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, xla_stage.unpack):
        y = layer(x)
    assert not any(isinstance(one, torch.Tensor) and tuple(one.shape) == (3, 5) for one in kept)
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), layer.weight.detach().cpu().sum(0).expand(2, 3))


@on_xla
def test_a_part_of_a_weight_or_a_weight_turned_twice_is_kept_as_it_is(started: int) -> None:
    from ppdsl.runtime.xla import stage as xla_stage

    for device in ("cpu", "xla:1"):
        weight = nn.Parameter(torch.arange(16.0).reshape(4, 4).to(device))
        for tensor in (weight[2:].t(), weight.t().t(), weight.view(4, 4).t(), weight.transpose(0, 0), weight):
            assert isinstance(xla_stage.pack(tensor), torch.Tensor)
        torch.testing.assert_close(xla_stage.unpack(xla_stage.pack(weight.t())).cpu(), weight.detach().t().cpu())


SPEC = """
pipeline net {
    schedule = gpipe
    microbatches = 4
    device = xla
    stage a @ 0 { layers.0, layers.1 }
    stage b @ 1 { layers.2, layers.3 }
}
"""


@on_xla
def test_a_spec_can_ask_for_xla_devices(started: int, tmp_path: Path) -> None:
    path = tmp_path / "net.ppspec"
    path.write_text(SPEC)
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    model.forward = lambda x: model.layers[3](model.layers[2](model.layers[1](model.layers[0](x))))  # type: ignore[method-assign]
    pipe = pp.pipeline(model, (torch.ones(2, WIDTH),), spec=path, loss=mean_square)
    assert torch.isfinite(pipe.step(torch.ones(8, WIDTH)).loss)
    assert {str(parameter.device) for parameter in model.parameters()} == {"xla:0", "xla:1"}


LATE = """
import torch
torch.ones(1, requires_grad=True).sum().backward()
from ppdsl.diagnostics import CallError
from ppdsl.runtime.xla.start import start
try:
    start()
except CallError as error:
    print(error.diagnostics[0].code, error.diagnostics[0].help)
"""


@on_xla
def test_a_backward_before_torch_xla_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, env=os.environ)
    assert done.stdout.strip() == "xla-late call torch_xla.device() before the first backward", done.stderr
