"""Measured times of modules: taken alone, kept in a file, read back strictly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from ppdsl.cli.entry import main
from ppdsl.diagnostics import SpecError
from ppdsl.recording.profile import profile_call
from ppdsl.spec.costfile import ModuleCost, parse_costs, seconds_of, write_costs
from tests.recording.harness import on_meta
from tests.spec_models.nets import Chain, Rotated, Steered, made, tokens, vectors


def test_each_called_module_is_measured_also_without_memory_for_the_model() -> None:
    model = on_meta(made(Chain))
    costs = profile_call(model, (tokens(),), repeats=2)
    assert [cost.module for cost in costs][:4] == ["embed", "h.0", "h.0.up", "h.0.down"]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_that_are_alike_are_measured_once() -> None:
    costs = {cost.module: cost for cost in profile_call(made(Chain), (tokens(),), repeats=2)}
    assert (costs["h.0"].forward, costs["h.0"].backward) == (costs["h.3"].forward, costs["h.3"].backward)


def test_a_module_without_gradient_has_no_backward() -> None:
    costs = {cost.module: cost for cost in profile_call(made(Rotated), (tokens(),), repeats=2)}
    assert costs["rotary"].backward == 0.0


def test_a_module_that_numbers_steer_can_be_measured() -> None:
    assert "inner" in [cost.module for cost in profile_call(made(Steered), (vectors(),), repeats=2)]


def test_a_module_that_writes_its_argument_in_place_can_be_measured() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)).double()
    assert [cost.module for cost in profile_call(model, (vectors(),), repeats=2)] == ["0", "1"]


def test_measuring_changes_nothing_of_the_model() -> None:
    model, twin = made(Chain), made(Chain)
    profile_call(model, (tokens(),), repeats=2)
    assert all(bool((a == b).all()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_cost_file_reads_back() -> None:
    costs = (ModuleCost("h.0", 0.001, 0.0025), ModuleCost("odd,name", 0.0, 1.5))
    assert parse_costs(write_costs(costs)) == costs
    assert seconds_of(costs) == {"h.0": 0.0035, "odd,name": 1.5}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["cost-header 1:1 A cost file begins with the line `module,forward,backward`. Found an empty file."]),
        ("h.0,1,2\n", ["cost-header 1:1 A cost file begins with the line `module,forward,backward`. Found 'h.0,1,2'."]),
        (
            "module,forward,backward\nh.0,1\nh.1,x,-2\nh.2,1,nan\n",
            [
                "cost-row 2:1 A row of a cost file has 3 cells: module, forward, backward. Found 2.",
                "cost-value 3:5 The forward time of `h.1` is 'x', which is no time in seconds.",
                "cost-value 3:7 The backward time of `h.1` is '-2', which is no time in seconds.",
                "cost-value 4:7 The backward time of `h.2` is 'nan', which is no time in seconds.",
            ],
        ),
        ("module,forward,backward\nh.0,1,2\n\nh.0,1,2\n", ["cost-twice 4:1 Module `h.0` comes twice."]),
    ],
)
def test_a_wrong_cost_file_says_where(text: str, found: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_costs(text)
    places = [(d, d.labels[0].span) for d in caught.value.diagnostics]
    assert [f"{d.code} {span.line}:{span.column} {d.message}" for d, span in places] == found


def test_reading_a_cost_file_needs_no_torch() -> None:
    code = "import sys, ppdsl.spec.costfile; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_the_command_writes_a_file_that_a_spec_can_use(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.csv"
    model = f"{Path(__file__).with_name('commands.py')}:chain"
    assert main(["profile", "--model", model, "-o", str(path)]) == 0
    assert "h.0" in [cost.module for cost in parse_costs(path.read_text())]
    assert main(["profile", "--model", model]) == 0
    assert capfd.readouterr().out.splitlines()[0].split() == ["module", "forward", "backward"]
