"""`pp.pipeline(spec=...)`: numbers of the unsplit model, defaults from the spec, mistakes told before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ppdsl as pp
from ppdsl.diagnostics import SpecError
from ppdsl.runtime.pipeline import Pipeline
from ppdsl.schedule.csv_text import from_rows
from ppdsl.spec.load import load_spec_text
from tests.recording.harness import on_meta, shape_of
from tests.runtime.launch import launch, said
from tests.spec_models.nets import made
from tests.spec_models.specs import CASES, SpecCase, gradient_error

ROOT = Path(__file__).resolve().parents[2]


def pipe_of(case: SpecCase, spec: str | None = None, **choices: object) -> Pipeline:
    return pp.pipeline(
        made(case.kind), (case.example(),), targets=case.targets, loss=case.loss,
        spec=load_spec_text(spec or case.spec, "net.ppspec"), **choices,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step_under_a_spec_has_loss_and_gradients_of_the_unsplit_model(name: str) -> None:
    case = CASES[name]
    pipe, twin = pipe_of(case), made(case.kind)
    assert shape_of(pipe._main.recording) == (case.labels, case.edges)
    count = pipe.schedule.microbatches
    given, targets = torch.cat([case.example()] * count), torch.cat([case.targets] * count)
    loss = case.loss(twin(given), targets)
    loss.backward()
    assert abs(float(pipe.step(given, targets=targets).loss - loss.detach())) < 1e-12
    assert gradient_error(pipe.module, twin) < 1e-10


def test_the_spec_gives_schedule_microbatches_placement_and_reduction() -> None:
    case = CASES["rotated"]
    pipe = pipe_of(case)
    assert (pipe.schedule.name, pipe.schedule.microbatches, pipe.schedule.placement) == ("gpipe", 4, (0, 1))
    tied = CASES["tied"]
    assert pipe_of(tied, tied.spec.replace("microbatches", "loss = sum microbatches")).facts["the reduction"] == "sum"


def test_an_argument_wins_over_the_spec() -> None:
    case = CASES["rotated"]
    pipe = pipe_of(
        case, schedule="1f1b", microbatches=3, placement={"part[0]": 1, "part[1]": 0}, reduction="sum"
    )  # fmt: skip
    assert (pipe.schedule.name, pipe.schedule.microbatches, pipe.schedule.placement) == ("1f1b", 3, (1, 0))
    assert pipe.facts["the reduction"] == "sum"


def test_stages_without_a_rank_go_round_the_ranks() -> None:
    spec = "pipeline net { ranks = 2 microbatches = 4 split embed, h[*], norm, head into 4 by count as p[i] }"
    assert pipe_of(CASES["chain"], spec).schedule.placement == (0, 1, 0, 1)


def test_an_own_order_places_the_stages(tmp_path: Path) -> None:
    case = CASES["tied"]
    order = "order { rank 0: 1F0 1F1 1B0 1B1 rank 1: 0F0 0F1 0B0 0B1 }"
    spec = f"pipeline net {{ schedule = {order} stage a {{ embed, h[:2] }} stage b {{ rest }} }}"
    pipe = pipe_of(case, spec)
    assert (pipe.schedule.placement, pipe.schedule.microbatches) == ((1, 0), 2)
    (tmp_path / "own.csv").write_text("1F0,1F1,1B0,1B1\n0F0,0F1,0B0,0B1\n")
    (tmp_path / "net.ppspec").write_text(spec.replace(order, 'csv("own.csv")'))
    pipe = pp.pipeline(
        made(case.kind), (case.example(),), targets=case.targets, loss=case.loss, spec=tmp_path / "net.ppspec"
    )  # fmt: skip
    assert pipe.schedule.rows == from_rows([["1F0", "1F1", "1B0", "1B1"], ["0F0", "0F1", "0B0", "0B1"]]).rows
    with pytest.raises(SpecError, match="Stage a is placed on rank 0, but order of the spec runs it on rank 1"):
        pipe_of(case, spec.replace("stage a", "stage a @ 0"))


def test_a_searched_schedule_runs() -> None:
    case = CASES["chain"]
    pipe = pipe_of(case, case.spec.replace("microbatches", "schedule = auto microbatches"))
    given, targets = torch.cat([case.example()] * 4), torch.cat([case.targets] * 4)
    assert pipe.schedule.microbatches == 4
    assert float(pipe.step(given, targets=targets).loss) == pytest.approx(
        float(case.loss(made(case.kind)(given), targets).detach()), abs=1e-12
    )


def test_parameters_of_the_spec_can_be_given(tmp_path: Path) -> None:
    case = CASES["chain"]
    path = tmp_path / "net.ppspec"
    path.write_text("param n = 2 pipeline net { split embed, h[*], norm, head into n by params as p[i] @ i }")
    for params, stages in ((None, 2), ({"n": 3}, 3)):
        pipe = pp.pipeline(
            made(case.kind), (case.example(),), targets=case.targets, loss=case.loss, spec=path, spec_params=params
        )  # fmt: skip
        assert len(pipe.graph.stages) == stages
    with pytest.raises(SpecError, match="spec_params are given with no spec"):
        pp.pipeline(made(case.kind), (case.example(),), spec_params={"n": 3})


def test_frozen_stages_get_no_gradient_and_the_model_is_divided_in_every_mode() -> None:
    case = CASES["chain"]
    pipe = pipe_of(case, case.spec.replace("{ embed }", "{ embed } with { freeze = true }"))
    given, targets = torch.cat([case.example()] * 4), torch.cat([case.targets] * 4)
    pipe.step(given, targets=targets)
    assert pipe.module.embed.weight.grad is None
    assert not pipe.module.embed.weight.requires_grad
    assert pipe.module.head.weight.grad is not None
    assert not pipe.graph.stages[0].trainable
    pipe.module.eval()
    labels = [stage.label for stage in pipe.graph.stages]
    assert pipe(given).shape == (8, 5, 11)
    assert float(pipe.evaluate(given, targets=targets).loss) > 0
    assert [stage.label for stage in pipe.graph.stages] == labels


def test_a_tied_parameter_cannot_be_frozen_in_one_stage_alone() -> None:
    case = CASES["tied"]
    with pytest.raises(SpecError, match=r"Stage a freezes `embed\.weight`, which stage b trains"):
        pipe_of(case, case.spec.replace("h[:2] }", "h[:2] } with { freeze = true }"))


def test_a_broken_contract_is_told_before_anything_runs() -> None:
    case = CASES["chain"]
    with pytest.raises(SpecError) as caught:
        pipe_of(case, case.spec.replace("stages == 4", "stages == 5"))
    assert str(caught.value).startswith(
        "error[broken-contract]: `expect stages == 5` is broken: stages is 4, not 5.\n --> net.ppspec:1:"
    )


def test_marks_in_the_code_have_no_effect_under_a_spec() -> None:
    model = made(CASES["chain"].kind)
    pp.begin(model.h[2], 1)
    graph = pp.record(
        model, CASES["chain"].example(), spec=load_spec_text("pipeline net { stage a { embed } stage b { rest } }")
    )  # fmt: skip
    assert [stage.key for stage in graph.stages] == ["a", "b"]
    assert [warning.code for warning in graph.warnings] == ["marks-ignored"]


def test_parameters_on_meta_are_divided_alike() -> None:
    for case in CASES.values():
        partition = load_spec_text(case.spec)
        real, bare = (
            pp.record(model, case.example(), spec=partition) for model in (made(case.kind), on_meta(made(case.kind)))
        )
        assert real.digest == bare.digest


def test_a_spec_by_time_measures_the_model() -> None:
    case = CASES["chain"]
    spec = "pipeline net { stage a { embed } split h[*] into 2 by time as b[i] stage c { norm, head } }"
    graph = pp.record(made(case.kind), case.example(), spec=load_spec_text(spec))
    assert [stage.label for stage in graph.stages] == ["a", "b[0]", "b[1]", "c"]


def test_a_spec_by_file_reads_its_costs(tmp_path: Path) -> None:
    case = CASES["chain"]
    (tmp_path / "costs.csv").write_text("module,forward,backward\nh.0,1,5\nh.1,1,1\nh.2,1,1\nh.3,1,1\n")
    path = tmp_path / "net.ppspec"
    path.write_text(
        'pipeline net { stage a { embed } split h[*] into 2 by file("costs.csv") as b[i] stage c { norm, head } }'
    )
    graph = pp.record(made(case.kind), case.example(), spec=path)
    assert graph.stages[1].modules == ("h.0",)
    (tmp_path / "costs.csv").write_text("module,forward,backward\nh.0,1\n")
    with pytest.raises(SpecError, match="A row of a cost file has 3 cells"):
        pp.record(made(case.kind), case.example(), spec=path)


def torchrun(*scenarios: str) -> dict[int, list[str]]:
    result = launch(2, *scenarios, worker=Path(__file__).with_name("worker.py"))
    heard = {rank: said(result, rank).splitlines() for rank in (0, 1)}
    assert result.returncode == 0, f"{heard}\n{result.stderr}"
    return heard


@pytest.mark.distributed
def test_processes_under_a_spec_have_the_loss_of_one_process() -> None:
    heard = torchrun("equal", "timed")
    assert heard[0] == heard[1] == ["# equal", "equal", "# timed", "True"]


@pytest.mark.distributed
def test_a_broken_spec_ends_alike_on_every_rank() -> None:
    heard = torchrun("broken", "alone")
    assert heard[0][:4] == heard[1][:4] == [
        "# broken",
        "SpecError: unclaimed-parameter: 8 parameters (560 elements) belong to no stage: `h[2]`, `h[3]`.",
        "SpecError: broken-contract: `expect stages == 3` is broken: stages is 2, not 3.",
        "SpecError: too-few-processes: The spec is for 3 ranks, but there are 2 processes.",
    ]  # fmt: skip
    assert heard[1][5].startswith("SpecError: unreadable-spec: ")
    assert heard[0][5].startswith("CallError: ")
