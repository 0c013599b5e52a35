"""Where an autograd graph can be cut into the part that gives input gradients and the part that gives weight gradients.

A node is *inside* when a gradient of a stage input flows through it; all other nodes lead to weights only. A node that
lies inside and has an edge to the outside computes both kinds of gradient; it is a *piece* of the weight gradient::

    loss <- linear <- gelu <- linear <- stage input        inside; both linears are pieces
              |                 |
            weight            weight                       outside

The graph of a micro-batch is walked once, always in the same order, so that nodes are known by their position. The
first walk finds out what each position is for; later ones only compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppdsl.recording import compat

__all__ = ["Cut", "Edges", "Piece", "find_cut"]

Edges = list[tuple[Any, int]]
"""(node, number of its input) of each position of a walk."""

_NODE = itemgetter(0)
_TORCHS_OWN = ("BackwardHookFunctionBackward",)
_UNDIVIDED = ("CheckpointFunctionBackward", "CompiledFunctionBackward")
"""Nodes with a backward of their own inside, which refuse to be asked for a part of it, or twice."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A node that computes input and weight gradients.

    Attributes:
        position: Where the walk finds it.
        results: Which of its results go to weights.
        edges: Where the walk finds the edges they go along.
    """

    position: int
    results: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """What is known of all graphs of one shape.

    Attributes:
        steps: Positions of nodes whose edges follow in the walk, in the order of the walk.
        kinds: Type of the node at each position.
        shared: Pairs of positions that are the same node.
        distinct: Number of different nodes, counting missing ones as one.
        leaves: For each stage input the position of its node, or None where no gradient comes to it.
        inner_roots: Numbers of the walk's starts that lie inside.
        outer_roots: Numbers of those that lead to weights only.
        pieces: In the order in which autograd runs them.
        breaks: For each piece whether weight gradients found so far may be added before the next piece is run: none
            of their weights occurs again.
        customs: Nodes that give both kinds of gradient at once; like pieces.
        early: For each of them whether its weights are not among the others', so that nothing has to wait.
        whole: Names of the nodes that cannot be asked for one kind of gradient.
        uncut: Whether nothing is left for later, or a node does not work in a part of a backward.
        sizes: For each piece the bytes of its weight gradients, once they are known.
    """

    steps: tuple[int, ...]
    kinds: list[type]
    shared: tuple[tuple[int, int], ...]
    distinct: int
    leaves: tuple[int | None, ...]
    inner_roots: tuple[int, ...]
    outer_roots: tuple[int, ...]
    pieces: tuple[Piece, ...]
    breaks: tuple[bool, ...]
    customs: tuple[Piece, ...]
    early: tuple[bool, ...]
    whole: tuple[str, ...]
    uncut: bool
    sizes: list[int] = field(default_factory=list)

    def match(self, roots: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]) -> Edges | None:
        """Return the edges of a graph by position, or None when it has another shape."""
        edges: Edges = [(root.node, root.output_nr) for root in roots]
        extend = edges.extend
        try:
            for position in self.steps:
                extend(edges[position][0].next_functions)
        except (AttributeError, IndexError):
            return None
        nodes = list(map(_NODE, edges))
        if list(map(type, nodes)) != self.kinds or len(set(nodes)) != self.distinct:
            return None
        if any(nodes[one] is not nodes[other] for one, other in self.shared):
            return None
        for place, leaf in zip(self.leaves, leaves, strict=True):
            if place is None:
                if get_gradient_edge(leaf).node in nodes:
                    return None
            elif nodes[place].variable is not leaf:
                return None
        return edges


def find_cut(roots: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]) -> tuple[Cut, Edges]:
    """Walk a graph for the first time.

    Args:
        roots: Where its backward starts.
        leaves: The stage's inputs that need a gradient.

    Returns:
        The cut, and the graph's edges by position.
    """
    walk = _Walk(roots)
    starts = [get_gradient_edge(leaf).node for leaf in leaves]
    walk.look_inside(starts)
    found = walk.find_pieces()
    customs = [piece for piece in found if walk.is_custom(piece.position)]
    pieces = [piece for piece in found if not walk.is_custom(piece.position)]
    hooked = [piece for piece in pieces if compat.saves_under_hooks(walk.edges[piece.position][0])]
    early, breaks = walk.find_breaks(pieces, customs)
    cut = Cut(
        steps=tuple(walk.kids),
        kinds=[type(node) for node, _ in walk.edges],
        shared=tuple(walk.shared),
        distinct=len({node for node, _ in walk.edges}),
        leaves=tuple(walk.first.get(start) for start in starts),
        inner_roots=tuple(number for number in range(len(roots)) if number not in walk.outer_roots),
        outer_roots=walk.outer_roots,
        pieces=tuple(pieces),
        breaks=breaks,
        customs=tuple(customs),
        early=early,
        whole=walk.names_of(customs, hooked),
        uncut=bool(walk.undivided or hooked) or (not pieces and bool(customs)),
    )
    return cut, walk.edges


class _Walk:
    """The first walk over a graph, and what it finds."""

    def __init__(self, roots: Sequence[GradientEdge]) -> None:
        self.edges: Edges = [(root.node, root.output_nr) for root in roots]
        self.roots = len(roots)
        self.first: dict[Any, int] = {}
        self.kids: dict[int, range] = {}
        self.shared: list[tuple[int, int]] = []
        for position, (node, _) in enumerate(self.edges):
            self._note(node, position)
        position = 0
        while position < len(self.edges):
            node = self.edges[position][0]
            if node is not None and self.first[node] == position:
                self._expand(node, position)
            position += 1
        self.inside: set[int] = set()
        self.outer_roots: tuple[int, ...] = ()

    def _note(self, node: Any, position: int) -> None:
        if node is None:
            return
        if node in self.first:
            self.shared.append((position, self.first[node]))
        else:
            self.first[node] = position

    def _expand(self, node: Any, position: int) -> None:
        following = node.next_functions
        if not following:
            return
        start = len(self.edges)
        self.kids[position] = range(start, start + len(following))
        for offset, edge in enumerate(following):
            self._note(edge[0], start + offset)
            self.edges.append(edge)

    def children(self, position: int) -> Iterable[int]:
        """Yield the first positions of the nodes that a node's edges lead to."""
        for kid in self.kids.get(position, ()):
            node = self.edges[kid][0]
            if node is not None:
                yield self.first[node]

    # ---------------------------------------------------------------- what lies inside

    def look_inside(self, starts: Iterable[Any]) -> None:
        """Find the nodes through which a gradient of one of `starts` flows."""
        parents: dict[int, list[int]] = {}
        for position in self.kids:
            for child in self.children(position):
                parents.setdefault(child, []).append(position)
        todo = [self.first[start] for start in starts if start in self.first]
        while todo:
            position = todo.pop()
            if position not in self.inside:
                self.inside.add(position)
                todo += parents.get(position, ())
        roots = range(self.roots)
        self.outer_roots = tuple(n for n in roots if self.first[self.edges[n][0]] not in self.inside)

    def _to_weights(self, position: int) -> list[int]:
        """Return the positions of a node's edges that lead to weights only."""
        edges = self.edges
        return [
            kid
            for kid in self.kids.get(position, ())
            if edges[kid][0] is not None and self.first[edges[kid][0]] not in self.inside
        ]

    @property
    def undivided(self) -> tuple[str, ...]:
        """Names of nodes with which a backward runs as a whole or not at all."""
        names = (self.edges[position][0].name() for position in sorted(self.inside))
        return tuple(name for name in names if name in _UNDIVIDED)

    # ---------------------------------------------------------------- pieces

    def is_custom(self, position: int) -> bool:
        """Whether a node is a custom Function's: nobody can tell it to compute less."""
        return isinstance(self.edges[position][0], torch.autograd.function.BackwardCFunction)

    def find_pieces(self) -> list[Piece]:
        """Return the nodes inside that have an edge to the outside, in autograd's order."""
        pieces = []
        for position in self.inside:
            targets = self._to_weights(position)
            if targets:
                start = self.kids[position].start
                pieces.append(Piece(position, tuple(kid - start for kid in targets), tuple(targets)))
        pieces.sort(key=lambda piece: -compat.sequence_number(self.edges[piece.position][0]))
        return pieces

    def names_of(self, customs: Sequence[Piece], hooked: Sequence[Piece]) -> tuple[str, ...]:
        """Return the names of the nodes that cannot be split, each once."""
        custom = [self.edges[piece.position][0].name() for piece in customs]
        names = [name for name in custom if name not in _TORCHS_OWN]
        names += [f"{self.edges[piece.position][0].name()} under saved-tensor hooks" for piece in hooked]
        names += self.undivided
        return tuple(dict.fromkeys(names))

    def find_breaks(
        self, pieces: Sequence[Piece], customs: Sequence[Piece]
    ) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return which customs share no weight with pieces, and for each piece whether all weights so far are done.

        A weight's hooks run once for a micro-batch, and its parts are added in one go, as in a whole backward.
        """
        groups = _Groups(self)
        roots = [groups.join(root) for root in self.outer_roots]
        parts = [[groups.join(kid) for kid in custom.edges] for custom in customs]
        users = [[groups.join(kid) for kid in piece.edges] for piece in pieces]
        last = dict.fromkeys(map(groups.top, roots), -1)
        for number, used in enumerate(users):
            last.update((groups.top(group), number) for group in used)
        late = [[groups.top(group) for group in used if groups.top(group) in last] for used in parts]
        first = [groups.top(group) for group in roots] + [group for used in late for group in used]
        needed = max((last[group] for group in first), default=-1)
        breaks = []
        for number, used in enumerate(users):
            needed = max(needed, *(last[groups.top(group)] for group in used))
            breaks.append(needed <= number)
        return tuple(not used for used in late), tuple(breaks)


class _Groups:
    """Which edges to weights lead to a common node."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._group: dict[int, int] = {}
        self._above: list[int] = []

    def top(self, group: int) -> int:
        """Return the number that all joined groups share."""
        while self._above[group] != group:
            group = self._above[group]
        return group

    def join(self, position: int) -> int:
        """Return the group of an edge, joined with all groups it has a node in common with."""
        group = len(self._above)
        self._above.append(group)
        todo = [self._walk.first[self._walk.edges[position][0]]]
        while todo:
            place = todo.pop()
            if place in self._group:
                self._above[self.top(group)] = self.top(self._group[place])
            else:
                self._group[place] = group
                todo += self._walk.children(place)
        return group
