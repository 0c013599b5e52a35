"""`ppdsl export`: marks become a spec that gives the same graph, or nothing is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.annotate import marks
from ppdsl.cli.entry import main
from ppdsl.cli.models import load_model
from ppdsl.diagnostics import SpecError
from ppdsl.graph.ir import StageGraph
from ppdsl.recording.exporting import export_marks
from ppdsl.recording.record import record_call
from ppdsl.spec.format import format_spec
from ppdsl.spec.load import load_spec, load_spec_text
from tests.spec_models.nets import Annotated, Branches, Chain, Twice, made, tokens, vectors

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MARKED = (
    "01_two_stages.py", "02_unet.py", "03_experts.py", "04_tied_gpt.py", "05_encoder_decoder.py", "06_huggingface.py",
)  # fmt: skip


def exported(model: nn.Module, *args: Tensor) -> str:
    return format_spec(export_marks(model, args, load=load_spec_text))


def without_marks(graph: StageGraph) -> str:
    """Everything that ranks agree on, but the places and the spelling of marks."""
    stages = tuple(replace(stage, span=None, key=stage.index) for stage in graph.stages)
    return replace(graph, stages=stages).digest


@pytest.mark.parametrize("name", MARKED)
def test_an_exported_example_has_the_same_graph_without_its_marks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = f"{EXAMPLES / name}:make"
    path = tmp_path / "out.ppspec"
    assert main(["export", "--model", target, "-o", str(path)]) == 0
    assert main(["fmt", "--check", str(path)]) == 0
    assert main(["check", str(path), "--model", target]) == 0
    capfd.readouterr()
    graphs = []
    for partition in (None, load_spec(path)):
        call = load_model(target)
        if partition is not None:
            pp.unmark(call.model)
            assert not marks(call.model)
        graphs.append(
            record_call(
                call.model, call.args, dict(call.kwargs), loss=call.loss, targets=call.targets, spec=partition
            ).graph
        )  # fmt: skip
    assert without_marks(graphs[0]) == without_marks(graphs[1])


def test_stages_name_the_largest_modules_that_lie_in_them() -> None:
    model = made(Chain)
    pp.begin(model.h[2], "late")
    line = marks(model)[0].span.line
    assert exported(model, tokens()) == (
        "pipeline Chain {\n"
        "    stage 0 { embed, h[0:2] }\n"
        f"    # marked at test_export.py:{line}\n"
        "    stage late { h[2:4], norm, head }\n"
        "}\n"
    )


def test_a_join_of_branches_stays_where_the_marks_have_it() -> None:
    model = made(Branches)
    for name in ("stem", "left", "right", "join"):
        pp.place(getattr(model, name), name)
    assert "cut before join as join" in exported(model, vectors())


def test_calls_of_a_module_in_several_stages_are_named_one_by_one() -> None:
    model = made(Twice)
    pp.begin(model.block, 1, call=1)
    assert [line for line in exported(model, vectors()).splitlines() if "stage" in line] == [
        "    stage 0 { first, call(block, 0) }",
        "    stage 1 { last, call(block, 1) }",
    ]


class Glued(nn.Module):
    """Stages meet between two operations, where no module begins or ends."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("one"):
            x = torch.relu(torch.tanh(self.a(x)))
        with pp.stage("two"):
            return self.b(torch.sigmoid(x))


class Named(Glued):
    """The same border, with a name."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage("one"):
            x = torch.relu(torch.tanh(self.a(x)))
        x = pp.cutpoint(x, "between", optional=True)
        with pp.stage("two"):
            return self.b(torch.sigmoid(x))


def test_a_border_without_a_name_is_said_and_nothing_is_written() -> None:
    with pytest.raises(SpecError) as caught:
        exported(made(Glued), vectors())
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.message) == (
        "not-expressible",
        "Stage two begins between two operations, before `sigmoid`, where no module begins or ends.",
    )
    assert finding.help == 'give the border a name in the model: pp.cutpoint(x, "name", optional=True)'


def test_a_border_with_a_name_is_cut_there() -> None:
    assert "cut at between as two" in exported(made(Named), vectors())


def test_a_mark_inside_one_module_is_exported_by_its_parts() -> None:
    text = exported(made(Annotated), vectors())
    assert [line.strip() for line in text.splitlines() if "stage " in line] == [
        "stage early { a, b }",
        "stage late { c }",
    ]
