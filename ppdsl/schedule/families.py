"""The families that ppdsl knows, in the order in which to show them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.arguments import Parameter
from ppdsl.schedule.arrangement import Arrangement, ChainOrder, lay_chain, loop_demand, v_demand
from ppdsl.schedule.building_block import v_half, v_min
from ppdsl.schedule.depth_rule import eager_1f1b, zero_bubble
from ppdsl.schedule.dualpipev import dualpipev, dualpipev_pairs
from ppdsl.schedule.family import Family, Pairing, Rows
from ppdsl.schedule.forward_only import forward_only
from ppdsl.schedule.gpipe import gpipe
from ppdsl.schedule.interleaved import interleaved, interleaved_zero_bubble
from ppdsl.schedule.looped_bfs import looped_bfs
from ppdsl.schedule.one_f_one_b import one_f_one_b
from ppdsl.schedule.sequential import sequential
from ppdsl.schedule.zbv import zbv

__all__ = ["FAMILIES"]

_V = Parameter("v", summary="stages on each rank; without it as many as the placement has")
_VARIANT = Parameter("variant", ("h1", "h2"), "h1", "h1: memory as 1f1b; h2: nearly twice that, ranks never wait")
_BACKWARD = Parameter("backward", ("lifo", "fifo"), "lifo", "lifo: newest micro-batch first, as PyTorch; fifo: oldest")


def _looped_bfs(
    graph: StageGraph, placement: Sequence[int], microbatches: int, ranks: int, *, backward: str = "lifo"
) -> Rows:
    return lay_chain(partial(looped_bfs, backward=backward), graph, placement, microbatches, ranks)


def _loop(name: str, order: ChainOrder, summary: str, *, split: bool, aliases: tuple[str, ...]) -> Family:
    return Family(
        name,
        partial(lay_chain, order),
        summary,
        splits_backward=split,
        demands=(loop_demand,),
        parameters=(_V,),
        arrangement=Arrangement.LOOP,
        aliases=aliases,
    )


def _v_shape(
    name: str, order: ChainOrder, summary: str, *, aliases: tuple[str, ...] = (), pairing: Pairing | None = None
) -> Family:
    return Family(
        name,
        partial(lay_chain, order),
        summary,
        splits_backward=True,
        demands=(v_demand,),
        arrangement=Arrangement.V,
        chunks=2,
        aliases=aliases,
        pairing=pairing,
    )


FAMILIES = (
    Family(
        "1f1b",
        one_f_one_b,
        "warm up by depth, then one forward, one backward; least memory",
        aliases=("dapple", "pipedream_flush", "one_f_one_b"),
    ),
    Family("eager_1f1b", eager_1f1b, "1f1b with twice the warm-up; hides the time of messages", aliases=("eager",)),
    Family("gpipe", gpipe, "all forwards, then all backwards"),
    _loop(
        "interleaved_1f1b",
        interleaved,
        "1f1b over several stages on each rank, in rounds; smaller bubble, more messages",
        split=False,
        aliases=("interleaved", "interleaved1f1b", "vpp"),
    ),
    Family(
        "looped_bfs",
        _looped_bfs,
        "all micro-batches through a rank's first stage, then its next",
        demands=(loop_demand,),
        parameters=(_V, _BACKWARD),
        arrangement=Arrangement.LOOP,
        aliases=("loopedbfs", "bfs", "breadth_first"),
    ),
    Family(
        "zero_bubble",
        zero_bubble,
        "1f1b with split backwards; weight gradients fill the drain",
        splits_backward=True,
        parameters=(_VARIANT,),
        aliases=("zb", "zb_h1=h1", "zb_h2=h2", "zbh1=h1", "zbh2=h2", "zb1p=h1", "zb2p=h2", "zb_1p=h1", "zb_2p=h2"),
    ),
    _loop(
        "interleaved_zero_bubble",
        interleaved_zero_bubble,
        "interleaved_1f1b with split backwards",
        split=True,
        aliases=("interleaved_zb", "interleavedzerobubble"),
    ),
    _v_shape(
        "zbv", zbv, "a V of two stages on each rank; no waiting for equal times", aliases=("zb_v", "zbvzerobubble")
    ),
    _v_shape(
        "dualpipev",
        dualpipev,
        "a V whose forwards run together with backwards of the other half",
        aliases=("dualpipe_v", "dual_pipe_v"),
        pairing=dualpipev_pairs,
    ),
    _v_shape("v_half", v_half, "a V with half of 1f1b's memory", aliases=("vhalf",)),
    _v_shape("v_min", v_min, "a V with a third of 1f1b's memory", aliases=("vmin",)),
    Family("sequential", sequential, "one micro-batch after the other, as a plain loop; for debugging"),
    Family("forward_only", forward_only, "no backward; what evaluate runs", backward=False, aliases=("eval",)),
)
