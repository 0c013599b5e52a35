"""Where the boxes of a stage graph go: layers by longest path, few crossings, straight wires.

The steps of Sugiyama, Tagawa and Toda 1981, each in its simplest form that gives good pictures of some tens of stages:

1. a stage stands one layer below the lowest stage it receives from;
2. a net that spans layers gets a post in each layer between;
3. each layer is sorted by the mean position of its neighbours, some sweeps down and up, the best order kept;
4. positions minimise the squared distance to neighbours, with the order and the gaps as constraints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ppdsl.graph.ir import Edge, StageGraph

__all__ = ["Hop", "Net", "Node", "Skeleton", "arrange", "group_nets", "spread"]

_SWEEPS = 12
_GAP = 3
_POST_WEIGHT = 1e-3  # posts make way for boxes


@dataclass(frozen=True, slots=True)
class Net:
    """Values that go from one stage to the same stages: drawn as one wire with branches.

    Attributes:
        producer: Stage that makes them.
        consumers: Stages that use them, ascending.
        edges: The values.
    """

    producer: int
    consumers: tuple[int, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a layer: a stage's box (`net` is None), or the post of a net that passes by (`stage` is None)."""

    layer: int
    stage: int | None
    net: int | None


@dataclass(frozen=True, slots=True)
class Hop:
    """A net's way from one layer to the next.

    Attributes:
        net: Index of the net.
        source: The producer's box, or the net's post.
        targets: Boxes of consumers, and the net's next post.
    """

    net: int
    source: Node
    targets: tuple[Node, ...]


@dataclass(frozen=True)
class Skeleton:
    """Layers, their order, and where each node stands.

    Attributes:
        nets: The wires.
        layers: For each layer its nodes from left to right.
        hops: For each layer the ways to the next one.
        centre: For each node the column of its middle.
        width: Columns in use.
    """

    nets: tuple[Net, ...]
    layers: tuple[tuple[Node, ...], ...]
    hops: tuple[tuple[Hop, ...], ...]
    centre: Mapping[Node, int]
    width: int


def arrange(graph: StageGraph, widths: Sequence[int], room: Sequence[int], columns: int) -> Skeleton | None:
    """Return the arrangement of a graph in `columns` columns, or None when its widest layer does not fit.

    Args:
        graph: What is drawn.
        widths: For each stage the width of its box.
        room: For each net, in the order of `nets`, the columns its label wants beside a post.
        columns: Columns at hand.
    """
    nets = group_nets(graph)
    layer_of = _layers(graph)
    nodes = _with_posts(nets, layer_of)
    hops = _hops(nets, layer_of)
    layers = _order(nodes, hops)
    sides = {node: _sides(node, widths, room) for layer in layers for node in layer}
    if any(_least(layer, sides) > columns for layer in layers):
        return None
    centre = _positions(layers, hops, sides, columns)
    left = min(centre[node] - sides[node][0] for node in centre)
    right = max(centre[node] + sides[node][1] for node in centre)
    return Skeleton(
        nets,
        tuple(map(tuple, layers)),
        tuple(map(tuple, hops)),
        {node: x - left for node, x in centre.items()},
        right - left + 1,
    )


def group_nets(graph: StageGraph) -> tuple[Net, ...]:
    """Return the wires of a graph: values with the same producer and the same consumers go together."""
    groups: dict[tuple[int, tuple[int, ...]], list[Edge]] = {}
    for edge in graph.edges:
        groups.setdefault((edge.producer, edge.consumers), []).append(edge)
    return tuple(Net(producer, consumers, tuple(edges)) for (producer, consumers), edges in groups.items())


def spread(wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return positions nearest to the wanted ones that keep the order and the gaps (pool adjacent violators).

    Args:
        wanted: Where each would like to be.
        weights: How much each minds.
        gaps: Least distance from each to the one before it; the first is ignored.

    >>> spread([0, 0, 9], [1, 1, 1], [0, 2, 2])
    [-1.0, 1.0, 9.0]
    """
    offsets: list[float] = []
    for position, gap in enumerate(gaps):
        offsets.append(offsets[-1] + gap if position else 0.0)
    pools: list[tuple[float, float, int]] = []
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, total, count = want - offset, weight, 1
        while pools and pools[-1][0] > mean:
            before, mass, members = pools.pop()
            mean = (mean * total + before * mass) / (total + mass)
            total, count = total + mass, count + members
        pools.append((mean, total, count))
    level = [mean for mean, _, count in pools for _ in range(count)]
    return [y + offset for y, offset in zip(level, offsets, strict=True)]


def _layers(graph: StageGraph) -> tuple[int, ...]:
    layer: list[int] = []
    for stage in graph.stages:
        layer.append(1 + max((layer[p] for p in graph.predecessors(stage.index)), default=-1))
    for stage in graph.stages:
        after = graph.successors(stage.index)
        if after and not graph.predecessors(stage.index):
            layer[stage.index] = min(layer[s] for s in after) - 1
    return tuple(layer)


def _with_posts(nets: Sequence[Net], layer_of: Sequence[int]) -> list[list[Node]]:
    """Return the nodes of each layer, boxes first: posts stand at the right unless something speaks against it."""
    layers: list[list[Node]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for stage, layer in enumerate(layer_of):
        layers[layer].append(Node(layer, stage, None))
    for index, net in sorted(enumerate(nets), key=lambda pair: -layer_of[pair[1].producer]):
        for layer in range(layer_of[net.producer] + 1, max(layer_of[c] for c in net.consumers)):
            layers[layer].append(Node(layer, None, index))
    return layers


def _hops(nets: Sequence[Net], layer_of: Sequence[int]) -> list[list[Hop]]:
    hops: list[list[Hop]] = [[] for _ in range(max(layer_of, default=-1) + 1)]
    for index, net in enumerate(nets):
        first, last = layer_of[net.producer], max(layer_of[c] for c in net.consumers)
        source = Node(first, net.producer, None)
        for layer in range(first + 1, last + 1):
            targets = [Node(layer, c, None) for c in net.consumers if layer_of[c] == layer]
            if layer < last:
                targets.append(Node(layer, None, index))
            hops[layer - 1].append(Hop(index, source, tuple(targets)))
            source = Node(layer, None, index)
    return hops


def _neighbours(hops: Sequence[Sequence[Hop]], *, above: bool) -> dict[Node, list[Node]]:
    found: dict[Node, list[Node]] = {}
    for hop in (hop for layer in hops for hop in layer):
        for target in hop.targets:
            node, other = (target, hop.source) if above else (hop.source, target)
            found.setdefault(node, []).append(other)
    return found


def _order(layers: Sequence[Sequence[Node]], hops: Sequence[Sequence[Hop]]) -> list[list[Node]]:
    """Sort each layer by the mean place of its neighbours; keep the order with the fewest crossings."""
    current = [list(layer) for layer in layers]
    best, least = [list(layer) for layer in current], _crossings(current, hops)
    sides = (_neighbours(hops, above=True), _neighbours(hops, above=False))
    for sweep in range(_SWEEPS):
        if least == 0:
            break
        near = sides[sweep % 2]
        for layer in current if sweep % 2 == 0 else reversed(current):
            place = {node: i / max(1, len(row) - 1) for row in current for i, node in enumerate(row)}
            mean = {n: sum(place[o] for o in near[n]) / len(near[n]) if n in near else place[n] for n in layer}
            layer.sort(key=mean.__getitem__)
        crossings = _crossings(current, hops)
        if crossings < least:
            best, least = [list(layer) for layer in current], crossings
    return best


def _crossings(layers: Sequence[Sequence[Node]], hops: Sequence[Sequence[Hop]]) -> int:
    place = {node: i for layer in layers for i, node in enumerate(layer)}
    total = 0
    for layer in hops:
        lines = [(place[hop.source], place[target], hop.net) for hop in layer for target in hop.targets]
        total += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 and a[2] != b[2] for i, a in enumerate(lines) for b in lines[:i])
    return total


def _sides(node: Node, widths: Sequence[int], room: Sequence[int]) -> tuple[int, int]:
    """Return how far a node reaches to the left and to the right of its middle."""
    if node.stage is None:
        return 0, room[node.net] if node.net is not None else 0
    return (widths[node.stage] - 1) // 2, widths[node.stage] // 2


def _least(layer: Sequence[Node], sides: Mapping[Node, tuple[int, int]]) -> int:
    return sum(sum(sides[node]) + 1 for node in layer) + _GAP * (len(layer) - 1)


def _positions(
    layers: Sequence[Sequence[Node]],
    hops: Sequence[Sequence[Hop]],
    sides: Mapping[Node, tuple[int, int]],
    columns: int,
) -> dict[Node, int]:
    """Pull each node to its neighbours, layer by layer, within the columns at hand."""
    above, below = _neighbours(hops, above=True), _neighbours(hops, above=False)
    centre: dict[Node, float] = {node: columns / 2 for layer in layers for node in layer}
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _place(layer, (above, below), sides, centre, columns)
    final = {node: math.floor(x + 0.5) for node, x in centre.items()}  # monotone, so gaps stay
    _straighten(layers, above, sides, final)
    _straighten(layers[::-1], below, sides, final)
    return final


def _place(
    layer: Sequence[Node],
    near: tuple[Mapping[Node, Sequence[Node]], Mapping[Node, Sequence[Node]]],
    sides: Mapping[Node, tuple[int, int]],
    centre: dict[Node, float],
    columns: int,
) -> None:
    wanted: list[float] = []
    weights: list[float] = []
    for node in layer:
        others = [o for side in near for o in side.get(node, ())]
        if node.stage is not None:
            # Boxes line up with boxes: a chain stays straight whatever passes beside it.
            others = [o for o in others if o.stage is not None] or others
        wanted.append(sum(centre[o] for o in others) / len(others) if others else columns / 2)
        weights.append(1.0 if node.stage is not None else _POST_WEIGHT)
    gaps = [0.0] + [float(sides[a][1] + _GAP + 1 + sides[b][0]) for a, b in pairwise(layer)]
    low, high = sides[layer[0]][0], columns - 1 - sides[layer[-1]][1] - sum(gaps)
    offset = 0.0
    for node, x, gap in zip(layer, spread(wanted, weights, gaps), gaps, strict=True):
        offset += gap
        centre[node] = min(max(x - offset, low), high) + offset


def _straighten(
    layers: Sequence[Sequence[Node]],
    near: Mapping[Node, Sequence[Node]],
    sides: Mapping[Node, tuple[int, int]],
    centre: dict[Node, int],
) -> None:
    """Move posts in line with the same net's post in the layer before, where there is room."""
    for layer in layers:
        for position, node in enumerate(layer):
            posts = [other for other in near.get(node, ()) if other.net is not None and other.net == node.net]
            if not posts:
                continue
            want = centre[posts[0]]
            before = layer[position - 1] if position else None
            after = layer[position + 1] if position + 1 < len(layer) else None
            left = 0 if before is None else centre[before] + sides[before][1] + _GAP
            right = want if after is None else centre[after] - sides[after][0] - sides[node][1] - _GAP
            if left <= want <= right:
                centre[node] = want
