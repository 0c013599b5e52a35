"""Expectations, ties and weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from ppdsl.source import Span
from ppdsl.spec.check_stages import key_of
from ppdsl.spec.context import Context
from ppdsl.spec.keywords import MEASURES, STAGE_MEASURES
from ppdsl.spec.nodes import EdgesNode, ExpectNode, StageReference, TieNode, WeightNode
from ppdsl.spec.partition import Expectation, Key, Measure, TieDecl, TiePolicy, Weight
from ppdsl.spec.quantities import bound_of, factor_of
from ppdsl.spec.selections import selection_of
from ppdsl.spec.suggest import did_you_mean
from ppdsl.spec.terms import PathNode, PathPartKind
from ppdsl.spec.writing import item_text

__all__ = ["edges_of", "expectation_of", "tie_of", "weight_of"]


def expectation_of(node: ExpectNode, keys: Mapping[Key, Span], context: Context) -> Expectation | None:
    """Return a contract, or None after a finding."""
    if node.measure not in MEASURES:
        context.unknown("unknown-measure", "measure", node.measure, (*MEASURES, "edges"), node.measure_span)
        return None
    stage = None
    if node.stage is not None:
        if node.measure not in STAGE_MEASURES:
            message = f"`{node.measure}` is measured of the whole plan, not of one stage."
            context.report("wrong-measure", message, node.stage.span, help=f"write `expect {node.measure}`")
            return None
        stage = _stage(node.stage, keys, context)
        if stage is None:
            return None
    bound = bound_of(node.bound, MEASURES[node.measure], node.measure, node.bound.span, context)
    if bound is None:
        return None
    return Expectation(Measure(node.measure), stage, node.comparison, bound, (), item_text(node), node.span)


def edges_of(node: EdgesNode, keys: Mapping[Key, Span], context: Context) -> Expectation | None:
    """Return the contract on edges, or None after a finding."""
    chains = [[[_stage(one, keys, context) for one in link] for link in chain] for chain in node.chains]
    pairs: dict[tuple[Key, Key], None] = {}
    for chain in chains:
        for sources, targets in pairwise(chain):
            if len(pairs) + len(sources) * len(targets) > 20_000:
                context.report("too-many-stages", "The expectation names more than 20000 edges.", node.span)
                return None
            for source in sources:
                for target in targets:
                    if source is None or target is None:
                        return None
                    pairs[source, target] = None
    return Expectation(Measure.EDGES, None, "", 0.0, tuple(pairs), item_text(node), node.span)


def tie_of(node: TieNode, context: Context) -> TieDecl | None:
    """Return what is said about tied parameters, or None after a finding."""
    names = [_parameter(path, context) for path in node.paths]
    if None in names:
        return None
    policy = None if node.policy is None else TiePolicy(node.policy)
    return TieDecl(tuple(name for name in names if name is not None), policy, node.span)


def weight_of(node: WeightNode, context: Context) -> Weight | None:
    """Return a weight, or None after a finding."""
    selection, factor = selection_of(node.selection, context, {}), factor_of(node.factor, node.factor.span, context)
    return None if selection is None or factor is None else Weight(selection, factor, node.span)


def _parameter(path: PathNode, context: Context) -> str | None:
    names: list[str] = []
    for part in path.parts:
        index = None if part.index is None else context.value(part.index)
        if part.kind is PathPartKind.NAME:
            names.append(part.name)
        elif part.kind is PathPartKind.INDEX and index is not None and index >= 0:
            names.append(str(index))
        elif part.kind is PathPartKind.INDEX and index is None:
            return None
        else:
            message = "A tie names single parameters, without stars, slices or negative indices."
            context.report("wrong-tie", message, path.span, help="write `tie a.weight = b.weight`")
            return None
    return ".".join(names)


def _stage(node: StageReference, keys: Mapping[Key, Span], context: Context) -> Key | None:
    index = None if node.index is None else context.value(node.index)
    if node.index is not None and index is None:
        return None
    key = key_of(node.name, index)
    if key in keys:
        return key
    if context.complete:
        names = [str(known) for known in keys]
        family = [name for name in names if name.startswith(f"{node.name}[")]
        meant = did_you_mean(str(key), names) or (f"its stages: {', '.join(names[:8])}" if names else None)
        if node.index is None and family:
            meant = f"name one of the family, as in `{family[0]}`"
        context.report("unknown-stage", f"No stage is named `{key}`.", node.span, help=meant)
    return None
