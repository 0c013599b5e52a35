"""Where stages go when nobody says, and schedules that are searched."""

from __future__ import annotations

import pytest
import torch

import ppdsl as pp
from ppdsl.graph.shapes import chain_graph
from ppdsl.runtime.arranging import placement_for
from ppdsl.runtime.choosing import search_schedule
from ppdsl.schedule.registry import build_schedule, named_family
from tests.runtime.every_family import differences
from tests.runtime.shapes import SHAPES


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [
        ("1f1b", 4, (0, 1, 2, 3)),
        ("zbv", 4, (0, 1, 1, 0)),
        ("dualpipev", 4, (0, 1, 1, 0)),
        ("interleaved_1f1b", 4, (0, 1, 0, 1)),
        ("interleaved_1f1b", 3, (0, 1, 2)),
        ("interleaved_1f1b(v=4)", 4, (0, 0, 0, 0)),
        ("looped_bfs", 2, (0, 1)),
        ("auto", 4, (0, 1, 2, 3)),
    ],
)
def test_in_one_process_a_family_takes_as_many_ranks_as_it_needs(
    schedule: str, stages: int, expected: tuple[int, ...]
) -> None:
    model = SHAPES["chain"].make(stages).double()
    pipe = SHAPES["chain"].pipeline(model, 8, schedule=schedule)
    assert pipe.schedule.placement == expected
    assert pipe.schedule.ranks == max(expected) + 1


def test_more_ranks_than_needed_stay_idle() -> None:
    assert placement_for(named_family("zbv"), chain_graph(4), ranks=4) == (0, 1, 1, 0)
    assert placement_for(named_family("interleaved_1f1b"), chain_graph(4), ranks=6) == (0, 1, 2, 3)


def test_stages_that_do_not_make_a_v_are_refused_with_the_number_that_would() -> None:
    with pytest.raises(pp.ScheduleError) as caught:
        SHAPES["chain"].pipeline(SHAPES["chain"].model(3), 8, schedule="zbv")
    assert str(caught.value).startswith(
        "error[placement-not-v]: The schedule goes there and back over 2 ranks, which takes 4 stages. Found 3."
    )


def test_a_placement_that_is_given_is_kept_or_refused() -> None:
    shape = SHAPES["chain"]
    pipe = shape.pipeline(shape.model(4), 8, schedule="zbv", placement={0: 1, 1: 0, 2: 0, 3: 1})
    assert pipe.schedule.placement == (1, 0, 0, 1)
    with pytest.raises(pp.ScheduleError, match="placement-not-v"):
        shape.pipeline(shape.model(4), 8, schedule="zbv", placement={0: 0, 1: 1, 2: 0, 3: 1})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("placement", [None, {0: 0, 1: 1, 2: 1, 3: 0}])
def test_a_searched_schedule_trains_and_evaluates_on_one_placement(name: str, placement: dict | None) -> None:
    shape = SHAPES[name]
    model = shape.model(4)
    pipe = shape.pipeline(model, 8, schedule="auto", placement=placement)
    assert differences(shape, pipe, shape.plain(4, 8), 8) == []
    inputs, target = shape.batch(8)
    assert torch.isfinite(pipe.evaluate(*inputs, targets=target).loss)


def test_all_processes_take_what_the_first_one_found() -> None:
    graph = chain_graph(2)
    first = build_schedule("gpipe", graph, (0, 1), microbatches=3)
    text = "\n".join([first.name, *(" ".join(map(str, row)) for row in first.rows)])

    class LaterProcess:
        def gather(self, own: str) -> list[str]:
            return [text, own]

    pytest.importorskip("ortools", reason="the solver is not installed: pip install 'ppdsl[solver]'")
    found = search_schedule("auto(solver=1)", graph, (0, 1), 3, 2, LaterProcess())
    assert (found.name, found.rows) == (first.name, first.rows)
    assert search_schedule("auto", graph, (0, 1), 3, 2, LaterProcess()).name != first.name
