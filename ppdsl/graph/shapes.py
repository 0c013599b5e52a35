"""Stage graphs without a model: chains and drawn shapes, for schedules that are studied on their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ppdsl.graph.ir import Edge, Stage, StageGraph, TensorMeta
from ppdsl.units import Bytes, Flops

__all__ = ["chain_graph", "shape_graph"]


def chain_graph(stages: int, *, flops: int = 1_000_000_000, bytes_per_edge: int = 4096) -> StageGraph:
    """Return a chain of equal stages, each feeding the next one.

    Args:
        stages: Number of stages, at least 1.
        flops: Floating-point operations of each stage's forward.
        bytes_per_edge: Size of the tensor between two stages, a multiple of 4.

    >>> print(chain_graph(3))
    chain: 3 stages, 2 edges
      stage 0: no modules
      stage 1: no modules
      stage 2: no modules
      0 -> 1: value0 float32[1024]
      1 -> 2: value1 float32[1024]
    """
    pairs = [(stage, (stage + 1,)) for stage in range(stages - 1)]
    return shape_graph(stages, pairs, flops=flops, bytes_per_edge=bytes_per_edge, name="chain")


def shape_graph(
    stages: int,
    edges: Iterable[tuple[int, Sequence[int]]],
    *,
    keys: Sequence[int | str] = (),
    frozen: Collection[int] = (),
    flops: int = 1_000_000_000,
    bytes_per_edge: int = 4096,
    name: str = "shape",
) -> StageGraph:
    """Return a graph of equal stages with the given edges.

    An edge carries a gradient when its producer has a backward.

    Args:
        stages: Number of stages, at least 1.
        edges: For each value the stage that makes it and the stages that use it.
        keys: For each stage its key; a key given again is another visit. Empty: the stage's own index.
        frozen: Indices of the stages without backward.
        flops: Floating-point operations of each stage's forward.
        bytes_per_edge: Size of each value, a multiple of 4.
        name: What the graph is called.

    Raises:
        GraphError: An edge does not lead to a later stage.

    A diamond whose first stage is frozen:

    >>> print(shape_graph(4, [(0, (1, 2)), (1, (3,)), (2, (3,))], frozen={0}, name="diamond"))
    diamond: 4 stages, 3 edges
      stage 0: no modules
      stage 1: no modules
      stage 2: no modules
      stage 3: no modules
      0 -> 1, 2: value0 float32[1024], no gradient
      1 -> 3: value1 float32[1024]
      2 -> 3: value2 float32[1024]
    """
    marks = tuple(keys) or tuple(range(stages))
    nodes = tuple(
        Stage(
            index=index,
            key=key,
            visit=marks[:index].count(key),
            parameter_bytes=Bytes(0),
            trainable=index not in frozen,
            has_backward=index not in frozen,
            flops=Flops(flops),
        )
        for index, key in enumerate(marks)
    )
    size = bytes_per_edge // 4
    values = tuple(
        Edge(
            index=index,
            value=f"value{index}",
            meta=TensorMeta((size,), "float32", (1,), requires_grad=producer not in frozen),
            producer=producer,
            consumers=tuple(sorted(set(consumers))),
        )
        for index, (producer, consumers) in enumerate(edges)
    )
    return StageGraph(stages=nodes, edges=values, loss=stages - 1, name=name)
