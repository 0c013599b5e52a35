"""From the marks of a model to the text of a spec that gives the same graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ppdsl.annotate import Key
from ppdsl.diagnostics import Diagnostic, Label, PpdslError, SpecError
from ppdsl.graph.ir import StageGraph
from ppdsl.graph.outline import ModelOutline, ModuleCall
from ppdsl.recording.outline import outline_of
from ppdsl.recording.record import record_call
from ppdsl.recording.session import LOCK, Session
from ppdsl.recording.signature import CallSignature
from ppdsl.recording.snapshot import preserved
from ppdsl.source import Span
from ppdsl.spec.accounting import fold_names
from ppdsl.spec.modules import ModuleTree, spell
from ppdsl.spec.partition import Partition

__all__ = ["Marked", "export_marks", "marked_outline"]

Load = Callable[[str], Partition]
"""Reads the text of a spec."""


@dataclass(frozen=True)
class Marked:
    """A recording with the stages that its marks gave it.

    Attributes:
        outline: Modules, calls and steps.
        steps: For each step its stage; None where the data flow decides.
        spans: Where each stage is marked.
    """

    outline: ModelOutline
    steps: tuple[Key | None, ...]
    spans: Mapping[Key, Span]

    @property
    def keys(self) -> tuple[Key, ...]:
        """Stages in the order in which they are first entered."""
        return tuple(dict.fromkeys(key for key in self.steps if key is not None))


def export_marks(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    load: Load,
) -> str:
    """Return the text of a spec under which the model, without its marks, has the graph that they give it.

    Args:
        model: The marked model.
        args: Positional example inputs, one micro-batch.
        kwargs: Named example inputs.
        loss: As for `record_call`.
        targets: As for `record_call`.
        load: Reads the text of a spec; what is exported is resolved and compared before it is returned.

    Raises:
        SpecError: A border of the marks cannot be said in a spec.
        RecordingError: The model cannot be recorded.
    """
    kwargs = kwargs or {}
    wanted = record_call(model, args, kwargs, loss=loss, targets=targets).graph
    marked = marked_outline(model, args, kwargs, loss, targets)
    names = _names(tuple(dict.fromkeys(stage.key for stage in wanted.stages)))
    differing: list[str] = []
    for text in (_by_modules(marked, names), _by_cuts(marked, names)):
        if text is None:
            continue
        try:
            found = record_call(model, args, kwargs, loss=loss, targets=targets, spec=load(text)).graph
        except PpdslError as error:
            differing.append(error.diagnostics[0].message)
            continue
        apart = _difference(_renamed(wanted, names), found)
        if apart is None:
            return text
        differing.append(apart)
    raise _inexpressible(marked, differing)


def marked_outline(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
) -> Marked:
    """Record a model with its marks and return its outline with their stages."""
    signature = CallSignature.of(model, args, kwargs, targets)
    with LOCK, preserved(model) as snapshot:
        session = Session(model, signature, loss, snapshot)
        tape = session.stable_tape()
        outline = outline_of(tape, model)
    return Marked(outline, tuple(record.stage for record in tape.records), dict(session.spans))


# ---------------------------------------------------------------- stages that name modules


def _by_modules(marked: Marked, names: Mapping[Key, str]) -> str | None:
    """Return a spec in which each stage names the largest modules that lie in it; None when one is left empty."""
    picker = _Picker(marked)
    for call in marked.outline.calls:
        if call.parent is None:
            picker.pick(call)
    members, tree = picker.members, picker.tree
    for name, key in _loose_parameters(marked, picker.taken):
        members[key].setdefault(name)
    if not all(members.values()):
        return None
    members[next(iter(members))].update(dict.fromkeys(_idle_modules(tree, picker.taken)))
    lines = []
    for key, found in members.items():
        modules = [name for name in found if not name.startswith("call(")]
        calls = [name for name in found if name.startswith("call(")]
        text = ", ".join(part for part in (fold_names(modules, tree), *calls) if part)
        lines += [*_reason(marked, key), f"stage {names[key]} {{ {text} }}"]
    return _pipeline(marked.outline.name, lines)


class _Picker:
    """Finds for each stage the largest modules whose calls all lie in it."""

    def __init__(self, marked: Marked) -> None:
        self._marked = marked
        self._inner: dict[int, list[ModuleCall]] = {}
        for call in marked.outline.calls:
            if call.parent is not None:
                self._inner.setdefault(call.parent, []).append(call)
        self.tree = ModuleTree.of(marked.outline)
        self.members: dict[Key, dict[str, None]] = {key: {} for key in marked.keys}
        self.taken: set[str] = set()

    def pick(self, call: ModuleCall) -> None:
        """Claim the called module, each of its calls, or what it calls."""
        name = call.module
        if name in self.taken:
            return
        keys = [_keys_of(self._marked, other) for other in self.tree.calls[self.tree.first.get(name, name)]]
        everywhere = set().union(*keys)
        if name and len(everywhere) == 1:
            self.taken.add(name)
            self.members[everywhere.pop()].setdefault(name)
        elif name and len(keys) > 1 and all(len(found) == 1 for found in keys):
            self.taken.add(name)
            for number, found in enumerate(keys):
                self.members[found.pop()].setdefault(f"call({spell(name)}, {number})")
        else:
            for child in self._inner.get(call.index, ()):
                self.pick(child)


def _keys_of(marked: Marked, call: ModuleCall) -> set[Key]:
    return {key for key in marked.steps[call.start : call.end] if key is not None}


def _loose_parameters(marked: Marked, taken: set[str]) -> Iterator[tuple[str, Key]]:
    """Parameters right in modules that are not claimed: each with the one stage that uses it there."""
    users: dict[str, set[Key]] = {}
    for step, key in zip(marked.outline.steps, marked.steps, strict=True):
        for name in step.parameters:
            if key is not None and not any(name == module or name.startswith(f"{module}.") for module in taken):
                users.setdefault(name, set()).add(key)
    for name, keys in users.items():
        if len(keys) == 1:
            yield name, next(iter(keys))


def _idle_modules(tree: ModuleTree, taken: set[str]) -> Iterator[str]:
    """Modules with parameters that are never called: they have to belong somewhere."""
    waiting = [""]
    while waiting:
        name = waiting.pop()
        if name and name in taken:
            continue
        if name and not tree.is_called(name):
            if tree.parameters_of(name):
                yield name
            continue
        waiting += [child for child in tree.children.get(name, ()) if tree.first[child] == child]


# ---------------------------------------------------------------- stages that begin at a place


def _by_cuts(marked: Marked, names: Mapping[Key, str]) -> str | None:
    """Return a spec with one cut for each border; None when a stage is entered twice or a border has no name."""
    runs = _runs(marked)
    if len({key for key, _, _ in runs}) != len(runs):
        return None
    lines = [*_reason(marked, runs[0][0]), f"stage {names[runs[0][0]]} {{ }}"]
    for (_, _, end), (key, start, _) in pairwise(runs):
        place = next((text for at in range(start, end - 1, -1) if (text := _place(marked, at)) is not None), None)
        if place is None:
            return None
        lines += [*_reason(marked, key), f"cut {place} as {names[key]}"]
    return _pipeline(marked.outline.name, lines)


def _runs(marked: Marked) -> list[tuple[Key, int, int]]:
    """Stretches of the recording in one stage: (stage, first step, end)."""
    runs: list[tuple[Key, int, int]] = []
    for step, key in enumerate(marked.steps):
        if key is None:
            continue
        if runs and runs[-1][0] == key:
            runs[-1] = (key, runs[-1][1], step + 1)
        else:
            runs.append((key, step, step + 1))
    return runs


def _place(marked: Marked, step: int) -> str | None:
    """Return how a cut before this step is written: at a cutpoint, before a call, or after one."""
    outline = marked.outline
    for cutpoint in outline.cutpoints:
        if cutpoint.step == step and cutpoint.name:
            return f"at {_quoted(cutpoint.name)}"
    for word, found in (
        ("before", (call for call in outline.calls if call.start == step and call.end > step)),
        ("after", (call for call in outline.calls if call.end == step and call.start < step)),
    ):
        for call in found:
            if call.module and outline.calls[call.index].parent is not None:
                once = sum(other.module == call.module for other in outline.calls) == 1
                return f"{word} {spell(call.module)}" if once else f"{word} call({spell(call.module)}, {call.number})"
    return None


# ---------------------------------------------------------------- text


def _pipeline(name: str, lines: list[str]) -> str:
    return f"pipeline {_word(name)} {{\n" + "".join(f"    {line}\n" for line in lines) + "}\n"


def _reason(marked: Marked, key: Key) -> list[str]:
    span = marked.spans.get(key)
    if span is None:
        return []
    return [f"# marked at {re.split(r'[/]', span.file)[-1]}:{span.line}"]


def _names(keys: tuple[Key, ...]) -> dict[Key, str]:
    """Return for each stage how a spec can call it."""
    names: dict[Key, str] = {}
    for key in keys:
        name = str(key) if isinstance(key, int) and key >= 0 else _word(str(key))
        while name in names.values():
            name += "_"
        names[key] = name
    return names


def _word(text: str) -> str:
    word = re.sub(r"\W+", "_", text).strip("_")
    return word if word and not word[0].isdecimal() else f"stage_{word}"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[^\W\d]\w*", name) else f'"{name}"'


# ---------------------------------------------------------------- comparing


def _renamed(graph: StageGraph, names: Mapping[Key, str]) -> StageGraph:
    return replace(
        graph,
        stages=tuple(
            replace(stage, key=stage.key if str(stage.key) == names[stage.key] else names[stage.key])
            for stage in graph.stages
        ),
    )


def _difference(wanted: StageGraph, found: StageGraph) -> str | None:
    """Return what differs between two graphs besides the places of marks, or None."""
    mine, other = (tuple(replace(stage, span=None) for stage in graph.stages) for graph in (wanted, found))
    if [stage.label for stage in mine] != [stage.label for stage in other]:
        return f"the stages would be {', '.join(stage.label for stage in other)}"
    for one, two in zip(mine, other, strict=True):
        if one != two:
            return f"stage {one.label} would hold other calls"
    rest = (wanted.edges, wanted.ties, wanted.inputs, wanted.outputs, wanted.loss)
    if rest != (found.edges, found.ties, found.inputs, found.outputs, found.loss):
        return "other values would go between the stages"
    return None


def _inexpressible(marked: Marked, differing: list[str]) -> SpecError:
    runs = _runs(marked)
    nameless = [
        (key, start)
        for (_, _, end), (key, start, _) in pairwise(runs)
        if all(_place(marked, at) is None for at in range(start, end - 1, -1))
    ]
    if not nameless:
        why = differing[0] if differing else "a stage holds no whole module"
        message = f"No spec says what the marks say: in one that names the modules of each stage, {why}."
        span = next((span for span in marked.spans.values()), None)
        return SpecError(Diagnostic("not-expressible", message, () if span is None else (Label(span),)))
    findings = []
    for key, start in nameless:
        step = marked.outline.steps[start]
        message = f"Stage {key} begins between two operations, before `{step.name}`, where no module begins or ends."
        labels = () if step.span is None else (Label(step.span),)
        advice = 'give the border a name in the model: pp.cutpoint(x, "name", optional=True)'
        findings.append(Diagnostic("not-expressible", message, labels, advice))
    return SpecError(*findings)
