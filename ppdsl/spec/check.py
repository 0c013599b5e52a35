"""The whole-file check: from the syntax tree of a spec to a `Partition`, with all findings at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.spec.check_contracts import edges_of, expectation_of, tie_of, weight_of
from ppdsl.spec.check_settings import settings_of
from ppdsl.spec.check_stages import Stages
from ppdsl.spec.context import LIMIT, Context
from ppdsl.spec.include import Gathered
from ppdsl.spec.nodes import (
    CutNode,
    EdgesNode,
    ExpectNode,
    LetNode,
    NosplitNode,
    ParamNode,
    ReplicateNode,
    SettingNode,
    SplitNode,
    StageNode,
    TieNode,
    WeightNode,
)
from ppdsl.spec.parse import limited
from ppdsl.spec.partition import Partition, Replica
from ppdsl.spec.selections import selection_of
from ppdsl.spec.suggest import did_you_mean

__all__ = ["Checked", "check"]


@dataclass(frozen=True)
class Checked:
    """A checked spec; without a partition when there are errors."""

    partition: Partition | None
    diagnostics: tuple[Diagnostic, ...]


def check(gathered: Gathered, overrides: Mapping[str, int], context: Context) -> Checked:
    """Check a spec as a whole.

    Args:
        gathered: Its items, those of included files among them.
        overrides: Values of parameters, by name.
        context: Takes findings; knows the folders.
    """
    _define(gathered, overrides, context)
    settings = settings_of(_settings(gathered, context), context)
    stages = Stages(context, settings.ranks)
    for item in gathered.body:
        match item:
            case StageNode():
                stages.add_stage(item)
            case SplitNode():
                stages.add_split(item)
            case CutNode():
                stages.add_cut(item)
            case _:
                pass
    rest = _rest(gathered, stages, context)
    _unused(gathered, context)
    head = gathered.head
    if head is None and context.complete:
        message = "The file has no pipeline."
        context.report("no-pipeline", message, gathered.start, help="write `pipeline NAME { ... }`")
    elif head is not None and context.complete and not stages.keys and not context.findings:
        message = f"Pipeline `{head.name}` has no stage."
        context.report("no-stages", message, head.head, help="write `stage NAME { modules }`, a split or a cut")
    if head is None or not context.complete or any(one.severity is Severity.ERROR for one in context.findings):
        return Checked(None, _sorted(context))
    known = [(node.name, context.values[node.name] or 0) for node in gathered.names if isinstance(node, ParamNode)]
    partition = Partition(
        name=head.name,
        file=gathered.file,
        stages=tuple(stages.stages),
        splits=tuple(stages.splits),
        cuts=tuple(stages.cuts),
        schedule=settings.schedule,
        settings=settings.settings(),
        order=tuple(stages.keys),
        parameters=tuple(known),
        source_digest=_digest(gathered, known),
        **rest,
    )
    return Checked(partition, _sorted(context))


def _sorted(context: Context) -> tuple[Diagnostic, ...]:
    """Return findings file by file, in the order of the text; those without a place first."""
    files = list(context.folders)

    def place(found: Diagnostic) -> tuple[int, int, int]:
        if not found.labels:
            return (-1, 0, 0)
        span = found.labels[0].span
        return (files.index(span.file) if span.file in files else len(files), span.line, span.column)

    return limited(sorted(context.findings, key=place))


def _define(gathered: Gathered, overrides: Mapping[str, int], context: Context) -> None:
    parameters = [node.name for node in gathered.names if isinstance(node, ParamNode)]
    lets = [node.name for node in gathered.names if isinstance(node, LetNode)]
    for name, value in overrides.items():
        if name in parameters and type(value) is int and abs(value) <= LIMIT:
            continue
        if name not in parameters and context.complete:
            what = f"`{name}` is a `let`" if name in lets else f"The spec has no parameter `{name}`"
            meant = did_you_mean(name, parameters) or (
                f"its parameters: {', '.join(parameters)}" if parameters else None
            )
            context.findings.append(Diagnostic("unknown-parameter", f"{what}, so it cannot be set.", help=meant))
        elif name in parameters:
            message = f"Parameter `{name}` is set to {value!r}, which is no whole number up to {LIMIT}."
            context.findings.append(Diagnostic("wrong-parameter", message))
    for node in gathered.names:
        expression = node.default if isinstance(node, ParamNode) else node.value
        own = context.value(expression)
        given = overrides.get(node.name) if isinstance(node, ParamNode) else None
        wrong = given is not None and (type(given) is not int or abs(given) > LIMIT)
        context.values[node.name] = own if given is None else None if wrong else given


def _settings(gathered: Gathered, context: Context) -> dict[str, SettingNode]:
    found: dict[str, SettingNode] = {}
    for item in gathered.body:
        if not isinstance(item, SettingNode):
            continue
        earlier = found.get(item.name)
        if earlier is not None and not gathered.overrides(item.span.file, earlier.span.file):
            label = Label(earlier.span, "first given here")
            context.report("duplicate-setting", f"Setting `{item.name}` is given twice.", item.span, label)
            continue
        found[item.name] = item
    return found


def _rest(gathered: Gathered, stages: Stages, context: Context) -> dict[str, Any]:
    replicas, ties, weights, nosplit, expectations = (list[Any]() for _ in range(5))
    for item in gathered.body:
        match item:
            case ReplicateNode(selection, _, span):
                found = selection_of(selection, context, {})
                replicas.append(None if found is None else Replica(found, span))
            case NosplitNode(selection):
                nosplit.append(selection_of(selection, context, {}))
            case WeightNode():
                weights.append(weight_of(item, context))
            case TieNode():
                ties.append(tie_of(item, context))
            case ExpectNode():
                expectations.append(expectation_of(item, stages.known, context))
            case EdgesNode():
                expectations.append(edges_of(item, stages.known, context))
            case _:
                pass
    named = {"replicas": replicas, "ties": ties, "weights": weights, "nosplit": nosplit, "expectations": expectations}
    return {name: tuple(one for one in made if one is not None) for name, made in named.items()}


def _unused(gathered: Gathered, context: Context) -> None:
    if not context.complete:
        return
    for node in gathered.names:
        if node.name not in context.used:
            what = "Parameter" if isinstance(node, ParamNode) else "Name"
            message = f"{what} `{node.name}` is never used."
            context.report("unused-name", message, node.span, severity=Severity.WARNING)


def _digest(gathered: Gathered, known: list[tuple[str, int]]) -> str:
    whole = hashlib.sha256()
    for text in (*gathered.texts, repr(known)):
        whole.update(f"{len(text)}\n{text}".encode("utf-8", "surrogatepass"))
    return whole.hexdigest()
