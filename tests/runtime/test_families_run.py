"""Every registered schedule runs on every shape of model, with the numbers of the plain loop."""

from __future__ import annotations

import pytest
import torch

from ppdsl.runtime import pipeline as pipelines
from ppdsl.schedule import Schedule, families
from tests.runtime.delays import SlowWorld
from tests.runtime.every_family import SCHEDULES, differences, evaluates_wrongly, options_for
from tests.runtime.launch import launch, said
from tests.runtime.shapes import SHAPES


def test_no_family_is_forgotten() -> None:
    assert {name.partition("(")[0] for name in SCHEDULES} == {f.name for f in families().values() if f.backward}


@pytest.mark.parametrize(("name", "stages"), [*((name, 4) for name in SHAPES), ("branches", 8)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_equals_the_plain_loop_whatever_the_order_of_ranks(
    monkeypatch: pytest.MonkeyPatch, schedule: str, name: str, stages: int
) -> None:
    monkeypatch.setattr(pipelines, "make_world", lambda *_: SlowWorld(7))
    shape, model = SHAPES[name], SHAPES[name].model(stages)
    pipe = shape.pipeline(model, 8, **options_for(schedule, stages, stages // 2))
    assert len(pipe.plan.rows) == stages // 2
    reference = shape.plain(stages, 8)
    assert differences(shape, pipe, reference, 8) == []
    assert not evaluates_wrongly(shape, pipe, reference[0], 8)


@pytest.mark.parametrize("name", ["unet", "branches"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "sequential"])
def test_a_stage_that_goes_through_its_micro_batches_in_order_has_the_bits_of_the_sequential_schedule(
    schedule: str, name: str
) -> None:
    shape = SHAPES[name]
    gradients: list[dict[str, torch.Tensor]] = []
    for chosen in (schedule, "sequential"):
        model = shape.model(4)
        pipe = shape.pipeline(model, 8, **options_for(chosen, 4, 2))
        inputs, target = shape.batch(8)
        pipe.step(*inputs, targets=target)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        if chosen == schedule:
            ordered = [stage for stage in pipe.graph.stages if in_order(pipe.schedule, stage.index)]
            in_any = {name for stage in pipe.graph.stages for name in stage.parameters}
    exact = {name for stage in ordered for name in stage.parameters}
    assert exact <= in_any
    for name_, gradient in gradients[0].items():
        if name_ in exact:
            assert torch.equal(gradient, gradients[1][name_]), name_
    if "lifo" not in schedule and schedule != "looped_bfs":
        assert exact == in_any


def in_order(schedule: Schedule, stage: int) -> bool:
    """Whether a stage adds its weight gradients in the order of micro-batches."""
    done = [a.microbatch for row in schedule.rows for a in row if a.stage == stage and a.kind in "BW"]
    return done == sorted(done)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_runs_on_real_processes(ranks: int) -> None:
    result = launch(ranks, "every_schedule", seconds=360)
    assert [said(result, rank, "every_schedule") for rank in range(ranks)] == ["equal"] * ranks, result.stderr
