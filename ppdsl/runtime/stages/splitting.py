"""A backward in two parts: the gradients of a stage's inputs now (I), those of its weights later (W).

I runs autograd for the inputs alone and notes, at each node that also computes weight gradients, what came into it. W
asks just these nodes once more, each for its weights only, and lets autograd carry the results on to `.grad`; nothing
between the nodes is walked or computed again::

    I    loss -> linear -> gelu -> linear -> stage input       each linear notes its incoming gradient
    W            linear            linear                      run from these notes, top down
                   v                 v
                 weight            weight

So a weight used twice on one path is counted once for each use, and hooks of weights run once for a micro-batch. A
node whose backward cannot give one kind of gradient alone (a custom Function, a checkpointed part) gives both in I.
Where no stage input needs a gradient, I has nothing to do and W is the whole backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.recording import compat
from ppdsl.runtime.stages.cut import Cut, Edges, find_cut

__all__ = ["Postponed", "Splitter", "warn_of_whole"]

Gradients = list[torch.Tensor | None]
Ready = list[tuple[GradientEdge, torch.Tensor]]

_BATCH = 1 << 20
"""Bytes of weight gradients after which they are added to `.grad`: what fits a cache, so that memory is used again."""

_SHAPES = 8
"""Graph shapes remembered for one stage; a stage with more builds its cut anew in each micro-batch."""


@dataclass(slots=True)
class Postponed:
    """What the weight gradients of a micro-batch need.

    Attributes:
        cut: How the graph is cut.
        nodes: The pieces' nodes.
        notes: For each piece the gradients that came into it.
        edges: For each piece the edges its results go along.
        ready: Gradients to add with the first ones, with their edges.
    """

    cut: Cut | None
    nodes: list[Any]
    notes: list[tuple[torch.Tensor | None, ...] | None]
    edges: list[tuple[GradientEdge, ...]]
    ready: Ready


class Splitter:
    """Splits the backwards of one stage.

    Args:
        report: Called once with the names of nodes that cannot be split, when some are found.
    """

    def __init__(self, report: Callable[[Sequence[str]], None]) -> None:
        self._report = report
        self._reported: set[str] = set()
        self._cuts: list[Cut] = []
        self._mask: _Mask | None = None
        self._refused: str | None = None

    def refuse(self, name: str) -> None:
        """Split nothing from now on, because the whole stage is one node of this name."""
        self._refused = name

    def input_gradients(
        self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> tuple[Gradients, Postponed | None]:
        """Return the gradients of `leaves`, None where none comes, and what is left to do, if anything.

        Args:
            roots: Where the backward starts.
            gradients: What comes into each root.
            leaves: The stage inputs that need a gradient.
        """
        if not leaves:
            return [], Postponed(None, [], [], [], list(zip(roots, gradients, strict=True)))
        if self._refused is not None:
            self._report_new([self._refused])
            torch.autograd.backward(roots, gradients)
            return [leaf.grad for leaf in leaves], None
        cut, edges = self._cut(roots, leaves)
        if cut.uncut:
            torch.autograd.backward(roots, gradients)
            return [leaf.grad for leaf in leaves], None
        later = _prepare(cut, edges)
        later.ready = [(roots[number], gradients[number]) for number in cut.outer_roots]
        customs = _Customs(cut, edges)
        del edges
        starts = [roots[number] for number in cut.inner_roots]
        given = [gradients[number] for number in cut.inner_roots]
        found: Gradients = [None] * len(leaves)
        if starts:
            found = list(compat.run_backward(starts, given, leaves, keep_graph=bool(later.nodes)))
            _add(customs.take(early=True))
            later.ready += customs.take(early=False)
        return found, later if later.nodes or later.ready else None

    def weight_gradients(self, later: Postponed) -> None:
        """Add the gradients that were left to `.grad`, and let go of what they needed."""
        ready, later.ready = later.ready, []
        cut = later.cut
        if cut is None or not later.nodes:
            _add(ready)
            return
        # Not before it is needed: a pipeline may be built without gradients.
        self._mask = mask = self._mask or _Mask()
        known = bool(cut.sizes)
        for start, stop in _batches(cut):
            sizes = mask.run(later, start, stop, ready)
            if not known:
                cut.sizes[:] = sizes
            _add(ready)
            ready.clear()

    def _cut(self, roots: Sequence[GradientEdge], leaves: Sequence[torch.Tensor]) -> tuple[Cut, Edges]:
        cuts = self._cuts
        for number, cut in enumerate(cuts):
            edges = cut.match(roots, leaves)
            if edges is not None:
                if number:
                    cuts.insert(0, cuts.pop(number))
                return cut, edges
        cut, edges = find_cut(roots, leaves)
        cuts[:] = [cut, *cuts[: _SHAPES - 1]]
        self._report_new(cut.whole)
        return cut, edges

    def _report_new(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._reported]
        if new:
            self._reported.update(new)
            self._report(new)


def warn_of_whole(stage: str, nodes: Sequence[str]) -> str:
    """Warn that a stage computes weight gradients of some nodes with the input gradients; return the sentence.

    Args:
        stage: Its label.
        nodes: Names of the nodes.
    """
    names = ", ".join(f"`{name}`" for name in nodes)
    message = (
        f"Stage {stage} cannot split the backward of {names}: its weight gradients are computed with the input "
        "gradients."
    )
    diagnostic = Diagnostic("backward-not-split", message, severity=Severity.WARNING)
    warnings.warn(PpdslWarning(render_plain([diagnostic])), stacklevel=2)
    return message


class _Customs:
    """Collects the weight gradients of nodes that give them with the input gradients."""

    def __init__(self, cut: Cut, edges: Edges) -> None:
        self._cut = cut
        self._edges = [[GradientEdge(*edges[position]) for position in piece.edges] for piece in cut.customs]
        self._results: list[tuple[torch.Tensor | None, ...]] = [()] * len(cut.customs)
        for number, piece in enumerate(cut.customs):
            edges[piece.position][0].register_hook(partial(_note, self._results, number))

    def take(self, *, early: bool) -> Ready:
        """Return the gradients that nothing has to wait for, or the others, with their edges."""
        ready: Ready = []
        for number, piece in enumerate(self._cut.customs):
            results = self._results[number]
            if results and self._cut.early[number] == early:
                pairs = zip(self._edges[number], (results[result] for result in piece.results), strict=True)
                ready += [(edge, gradient) for edge, gradient in pairs if gradient is not None]
                self._results[number] = ()
        return ready


def _note(results: list[Any], number: int, inputs: tuple[torch.Tensor | None, ...], outputs: object) -> None:
    results[number] = inputs


class _Mask:
    """Runs nodes by hand so that they compute their weight gradients only.

    While autograd's engine runs, a node computes what leads to one of the run's inputs. So the engine is started on a
    graph of one node, with the edges to weights as inputs, and that node's hook runs the others.
    """

    def __init__(self) -> None:
        with torch.enable_grad():
            self._leaf = torch.zeros((), requires_grad=True)
            self._root = get_gradient_edge(self._leaf.view(()))
        self._start = torch.ones(())
        # The node holds the hook, so the hook must not hold the node.
        self._work: list[Callable[[], None]] = []
        self._root.node.register_prehook(partial(_work_off, self._work))

    def run(self, later: Postponed, start: int, stop: int, ready: Ready) -> list[int]:
        """Run the pieces from `start` to `stop` and append what they give to `ready`.

        Returns:
            Its bytes by piece, if they are not known yet.
        """
        sizes: list[int] = []
        inputs = [self._leaf, *(edge for piece in later.edges[start:stop] for edge in piece)]
        self._work.append(partial(_run_pieces, later, start, stop, ready, sizes))
        try:
            compat.run_backward([self._root], [self._start], inputs, keep_graph=True)
        finally:
            self._work.clear()
        return sizes


def _work_off(work: list[Callable[[], None]], gradients: object) -> None:
    work[0]()


def _run_pieces(later: Postponed, start: int, stop: int, ready: Ready, sizes: list[int]) -> None:
    nodes, notes, edges = later.nodes, later.notes, later.edges
    pieces = later.cut.pieces if later.cut is not None else ()
    measure = later.cut is not None and not later.cut.sizes
    for number in range(start, stop):
        node, note = nodes[number], notes[number]
        # Dropped one after the other: what the upper nodes have saved is free for the lower ones' results.
        nodes[number] = notes[number] = None
        size = 0
        if note is not None:
            results = node(*note)
            for result, edge in zip(pieces[number].results, edges[number], strict=True):
                gradient = results[result]
                if gradient is not None:
                    ready.append((edge, gradient))
                    if measure:
                        size += gradient.numel() * gradient.element_size()
        edges[number] = ()
        sizes.append(size)


def _prepare(cut: Cut, edges: Edges) -> Postponed:
    """Make every piece's node note what comes into it."""
    nodes = [edges[piece.position][0] for piece in cut.pieces]
    notes: list[tuple[torch.Tensor | None, ...] | None] = [None] * len(nodes)
    for number, node in enumerate(nodes):
        node.register_prehook(partial(notes.__setitem__, number))
    ways = [tuple(GradientEdge(*edges[position]) for position in piece.edges) for piece in cut.pieces]
    return Postponed(cut, nodes, notes, ways, [])


def _batches(cut: Cut) -> list[tuple[int, int]]:
    """Return the runs of pieces after which weight gradients are added."""
    count = len(cut.pieces)
    if not cut.sizes:
        return [(0, count)]
    batches, start, size = [], 0, 0
    for number, (free, more) in enumerate(zip(cut.breaks, cut.sizes, strict=True)):
        size += more
        if free and (size >= _BATCH or number == count - 1):
            batches.append((start, number + 1))
            start, size = number + 1, 0
    return batches


def _add(ready: Ready) -> None:
    if ready:
        compat.run_backward([edge for edge, _ in ready], [gradient for _, gradient in ready])
