"""Wires between the layers of a drawing: ports on the boxes, tracks between the layers, no two wires on one line.

Between two layers each hop goes down from its source, along one horizontal track, and down to its targets::

    └──┬───┬──┘
       │   └───────┐        track 0
    ┌──▼──────┐    │
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppdsl.report.layers import Hop, Net, Node, Skeleton, spread

__all__ = ["Box", "Drawing", "Wire", "route"]


@dataclass(frozen=True, slots=True)
class Box:
    """A stage's box: left and top cell, width and height with its border."""

    stage: int
    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Wire:
    """A net as straight lines.

    Attributes:
        net: The values it carries.
        lines: Left or upper end and right or lower end of each line, in cells: `(x, y, x, y)`.
        arrows: Where it enters a consumer's box.
    """

    net: Net
    lines: tuple[tuple[int, int, int, int], ...]
    arrows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Boxes and wires in character cells, the origin at the upper left."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class _Path:
    """A hop, or a part of one, with its columns and its track (-1 when it runs straight down).

    Attributes:
        hop: The hop.
        source: Column in which it comes from above.
        targets: Columns in which it goes on below.
        track: Row between the layers in which it runs level.
        first: Whether this is the upper part of a hop that turns twice; the lower part starts where it ends.
        second: Whether this is such a lower part.
    """

    hop: Hop
    source: int
    targets: tuple[int, ...]
    track: int = -1
    first: bool = False
    second: bool = False


def route(skeleton: Skeleton, widths: Sequence[int], heights: Sequence[int]) -> Drawing:
    """Return boxes and wires for an arrangement.

    Args:
        skeleton: Layers and columns.
        widths: For each stage the width of its box.
        heights: For each stage the height of its box.
    """
    paths = [_paths(skeleton, layer, hops, widths) for layer, hops in enumerate(skeleton.hops)]
    boxes: list[Box] = []
    lines: dict[int, list[tuple[int, int, int, int]]] = {i: [] for i in range(len(skeleton.nets))}
    arrows: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(skeleton.nets))}
    top = bottom = 0
    for layer, nodes in enumerate(skeleton.layers):
        height = max((heights[n.stage] for n in nodes if n.stage is not None), default=1)
        for node in nodes:
            x = skeleton.centre[node]
            if node.stage is not None:
                width = widths[node.stage]
                boxes.append(Box(node.stage, x - (width - 1) // 2, top, width, height))
            elif node.net is not None:
                lines[node.net].append((x, top, x, top + height - 1))
        bottom = top + height - 1
        tracks = max((p.track for p in paths[layer]), default=-1) + 1
        following = bottom + 2 + tracks
        for path in paths[layer]:
            lines[path.hop.net] += _draw(path, paths[layer], bottom, following)
            arrows[path.hop.net] += _arrows(path, following)
        top = following
    wires = tuple(Wire(n, tuple(lines[i]), tuple(arrows[i])) for i, n in enumerate(skeleton.nets))
    return Drawing(tuple(boxes), wires, skeleton.width, bottom + 1)


def _draw(path: _Path, others: Sequence[_Path], bottom: int, following: int) -> list[tuple[int, int, int, int]]:
    """Return a path's lines between the last row of one layer and the first of the next."""
    if path.track < 0:
        return [(path.source, bottom, path.source, following)]
    row = bottom + 2 + path.track
    above = bottom
    if path.second:
        above = next(bottom + 2 + p.track for p in others if p.first and p.hop == path.hop)
    lines = [(path.source, above, path.source, row)]
    lines.append((min(path.source, *path.targets), row, max(path.source, *path.targets), row))
    return lines if path.first else lines + [(x, row, x, following) for x in path.targets]


def _arrows(path: _Path, following: int) -> list[tuple[int, int]]:
    if path.first:
        return []
    ends = zip(path.hop.targets, path.targets, strict=True)
    return [(x, following) for node, x in ends if node.stage is not None]


def _paths(skeleton: Skeleton, layer: int, hops: Sequence[Hop], widths: Sequence[int]) -> list[_Path]:
    sources = _source_columns(skeleton, layer, hops, widths)
    targets = _target_columns(skeleton, hops, sources, widths)
    paths = [_Path(hop, sources[hop], tuple(targets[hop, node] for node in hop.targets)) for hop in hops]
    return _with_tracks(paths, skeleton.width)


def _source_columns(skeleton: Skeleton, layer: int, hops: Sequence[Hop], widths: Sequence[int]) -> dict[Hop, int]:
    columns: dict[Hop, int] = {}
    for node in skeleton.layers[layer]:
        mine = [hop for hop in hops if hop.source == node]
        x = skeleton.centre[node]
        if node.stage is None:
            columns.update(dict.fromkeys(mine, x))
            continue
        left, right = _inside(node, x, widths)
        wanted = {hop: _wanted_source(skeleton, hop, left, right) for hop in mine}
        mine.sort(key=lambda hop: (wanted[hop], _mean(skeleton, hop.targets)))
        taken = {skeleton.centre[t] for hop in hops if hop.source != node for t in hop.targets if t.stage is None}
        places = _ports([wanted[hop] for hop in mine], left, right, taken)
        columns.update(zip(mine, places, strict=True))
    return columns


def _wanted_source(skeleton: Skeleton, hop: Hop, left: int, right: int) -> float:
    """Return a column straight above a target where there is one, else the middle, or the side where posts pass."""
    over = [skeleton.centre[t] for t in hop.targets if left <= skeleton.centre[t] <= right]
    middle = (left + right) / 2
    if over:
        return min(over, key=lambda x: abs(x - middle))
    if any(t.stage is not None for t in hop.targets):
        return middle
    return min(max(_mean(skeleton, hop.targets), left), right)


def _mean(skeleton: Skeleton, nodes: Sequence[Node]) -> float:
    return sum(skeleton.centre[n] for n in nodes) / len(nodes)


def _target_columns(
    skeleton: Skeleton, hops: Sequence[Hop], sources: Mapping[Hop, int], widths: Sequence[int]
) -> dict[tuple[Hop, Node], int]:
    columns: dict[tuple[Hop, Node], int] = {}
    for node in dict.fromkeys(t for hop in hops for t in hop.targets):
        mine = sorted((hop for hop in hops if node in hop.targets), key=lambda hop: sources[hop])
        x = skeleton.centre[node]
        if node.stage is None:
            columns.update(((hop, node), x) for hop in mine)
            continue
        left, right = _inside(node, x, widths)
        taken = {sources[hop] for hop in hops if hop not in mine}
        wanted = [min(max(float(sources[hop]), left), right) for hop in mine]
        if len(mine) == 1 and not left <= sources[mine[0]] <= right:
            wanted = [float(x)]
        places = _ports(wanted, left, right, taken)
        columns.update(((hop, node), place) for hop, place in zip(mine, places, strict=True))
    return columns


def _inside(node: Node, x: int, widths: Sequence[int]) -> tuple[int, int]:
    width = widths[node.stage] if node.stage is not None else 1
    left = x - (width - 1) // 2
    return left + 1, left + width - 2


def _ports(wanted: Sequence[float], left: int, right: int, taken: set[int]) -> list[int]:
    """Return a column for each port: in order, apart, inside the box, and off other wires where there is room."""
    count = len(wanted)
    gap = 2 if right - left >= 2 * (count - 1) else 1
    spots = spread(wanted, [1.0] * count, [float(gap)] * count)
    places: list[int] = []
    for position, spot in enumerate(spots):
        least = places[-1] + gap if places else left
        most = max(least, right - gap * (count - 1 - position))
        options = sorted(range(least, most + 1), key=lambda x: (x in taken, abs(x - spot)))
        places.append(options[0])
    return places


def _with_tracks(paths: Sequence[_Path], width: int) -> list[_Path]:
    """Give each path that bends a track; paths that share a column are stacked so that they do not touch."""
    straight = [p for p in paths if set(p.targets) == {p.source}]
    # Of wires to the right the rightmost turns first, of those to the left the leftmost: nests without crossing.
    waiting = sorted(
        (p for p in paths if set(p.targets) != {p.source}),
        key=lambda p: (-p.source, p.source) if _goes_right(p) else (p.source, -p.source),
    )
    used = {x for p in paths for x in (p.source, *p.targets)}
    placed: list[_Path] = []
    while waiting:
        ready = [p for p in waiting if not any(_above(other, p) for other in waiting if other is not p)]
        if not ready:
            # Each waits for another to turn first: one turns twice, through a column of its own.
            path = next((p for p in waiting if not p.first and not p.second), waiting[0])
            detour = min(set(range(width + len(used) + 1)) - used, key=lambda x: (x >= width, abs(x - path.source)))
            used.add(detour)
            upper, lower = (
                replace(path, targets=(detour,), first=True),
                replace(path, source=detour, second=True),
            )
            waiting[waiting.index(path) : waiting.index(path) + 1] = [upper, lower]
            continue
        path = ready[0]
        waiting.remove(path)
        track = max((q.track + 1 for q in placed if _above(q, path)), default=0)
        while any(q.track == track and _overlap(q, path) for q in placed):
            track += 1
        placed.append(replace(path, track=track))
    return [*straight, *placed]


def _goes_right(path: _Path) -> bool:
    return sum(path.targets) / len(path.targets) > path.source


def _above(first: _Path, second: _Path) -> bool:
    """Return whether the first must turn above the second: it starts in a column in which the second ends."""
    if first.hop == second.hop:
        return first.first and second.second
    return first.source in second.targets


def _overlap(first: _Path, second: _Path) -> bool:
    low, high = (min(first.source, *first.targets), max(first.source, *first.targets))
    other_low, other_high = (min(second.source, *second.targets), max(second.source, *second.targets))
    return low <= other_high + 1 and other_low <= high + 1
