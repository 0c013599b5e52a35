"""Placement: a rank for every stage key, or one clear error."""

from __future__ import annotations

import pytest
from hypothesis import given

from ppdsl.diagnostics import GraphError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.shapes import chain_graph, shape_graph
from ppdsl.plan import place
from tests.schedule.shapes import graphs


@given(graph=graphs())
def test_every_key_gets_a_rank_of_its_own_in_order(graph: StageGraph) -> None:
    keys = list(dict.fromkeys(stage.key for stage in graph.stages))
    assert place(graph, len(keys)) == tuple(keys.index(stage.key) for stage in graph.stages)


def test_all_visits_of_a_key_share_its_rank() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("body", "head", "body"))
    assert place(graph, 2) == (0, 1, 0)
    assert place(graph, 2, {"head": 0, "body": 1}) == (1, 0, 1)


def test_more_stages_than_ranks_are_never_folded_silently() -> None:
    with pytest.raises(GraphError) as caught:
        place(chain_graph(4), 2)
    assert str(caught.value) == (
        "error[more-stages-than-ranks]: The model has 4 stages, but there are 2 ranks, and no placement says who "
        "shares one.\n"
        "help: run on 4 ranks, or give a placement such as placement={0: 0, 1: 1, 2: 0, 3: 1}"
    )


def test_fewer_stages_than_ranks_leave_ranks_idle() -> None:
    with pytest.raises(GraphError) as caught:
        place(chain_graph(2), 4)
    assert str(caught.value) == (
        "error[idle-ranks]: Ranks 2, 3 have no stage: the model has 2 stages, and there are 4 ranks.\n"
        "help: run on 2 ranks, or mark more stages"
    )
    assert place(chain_graph(2), 4, allow_idle=True) == (0, 1)


def test_everything_wrong_with_a_placement_is_said_at_once() -> None:
    graph = shape_graph(3, [(0, (1,)), (1, (2,))], keys=("embed", "body", "head"))
    with pytest.raises(GraphError) as caught:
        place(graph, 2, {"embed": 4, "boddy": 0})
    assert str(caught.value) == (
        "error[unknown-rank]: Stage 'embed' is on rank 4, but there are 2 ranks.\n"
        "help: use a rank from 0 to 1, or run on more ranks\n"
        "\n"
        "error[unknown-stage]: The placement names stage 'boddy', which the model does not have.\n"
        "help: did you mean 'body'? one of: 'embed', 'body', 'head'\n"
        "\n"
        "error[stage-without-rank]: The placement has no rank for stages 'body', 'head'.\n"
        "help: add 'body': RANK to it"
    )


def test_a_number_written_as_text_is_another_key() -> None:
    with pytest.raises(GraphError) as caught:
        place(chain_graph(2), 2, {"0": 0, 1: 1})
    assert "did you mean 0? one of: 0, 1" in str(caught.value)
