"""The declared order of stages against the data flow.

A stage may be visited more than once: that costs time, and is a warning. A stage that is declared before another and
only ever computes with what that one made is declared in the wrong order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.graph.outline import Assignment, ModelOutline
from ppdsl.spec.cuts import Key

__all__ = ["check_order"]


def check_order(assignment: Assignment, outline: ModelOutline) -> Iterator[Diagnostic]:
    """Yield stages that are declared in the wrong order, and those that are visited more than once."""
    flow = _Flow(assignment, outline)
    number = {key: at for at, key in enumerate(assignment.keys)}
    span = dict(zip(assignment.keys, assignment.spans, strict=True))
    for (source, target), step in flow.edges.items():
        if number[source] > number[target] and source not in flow.reached[target]:
            text = (
                f"Stage `{target}` is declared before stage `{source}`, but it needs what `{source}` makes, "
                f"first in step {step} (`{outline.steps[step].name}`)."
            )
            labels = (Label(span[target], "declared first, runs second"), Label(span[source], "runs first"))
            yield Diagnostic("order-contradicts", text, labels, f"declare `{source}` before `{target}`")
    for key, step in flow.again.items():
        entered = outline.steps[step]
        text = (
            f"Stage `{key}` is visited more than once: it is entered again in step {step} (`{entered.name}`), "
            "with what another stage made of its own results."
        )
        labels = (Label(span[key]), *((Label(entered.span, "entered again here"),) if entered.span else ()))
        yield Diagnostic("visited-twice", text, labels, severity=Severity.WARNING)


class _Flow:
    """Values between stages; what no stage claims, or every stage repeats, is passed through.

    Attributes:
        edges: (from, to) with the first step that needs it.
        reached: For each key all that is computed from what it makes.
        again: For each key that is left and entered again, the first step of the second visit.
    """

    def __init__(self, assignment: Assignment, outline: ModelOutline) -> None:
        bit = {key: 1 << at for at, key in enumerate(assignment.keys)}
        sources: list[int] = []  # for each step the stages its value comes from
        left: list[int] = []  # for each step the stages that were left on the way to it
        self.edges: dict[tuple[Key, Key], int] = {}
        self.again: dict[Key, int] = {}
        for step in outline.steps:
            key = assignment.steps[step.index]
            inputs = past = 0
            for need in step.needs:
                inputs |= sources[need]
                past |= left[need]
            if key is None:
                sources.append(inputs)
                left.append(past)
                continue
            past |= inputs & ~bit[key]
            if past & bit[key]:
                self.again.setdefault(key, step.index)
            for other in assignment.keys if inputs & ~bit[key] else ():
                if bit[other] & inputs and other != key:
                    self.edges.setdefault((other, key), step.index)
            sources.append(bit[key])
            left.append(past)
        self.reached = _closure(assignment.keys, self.edges)


def _closure(keys: tuple[Key, ...], edges: dict[tuple[Key, Key], int]) -> dict[Key, set[Key]]:
    after: dict[Key, set[Key]] = {key: set() for key in keys}
    for source, target in edges:
        after[source].add(target)
    reached: dict[Key, set[Key]] = {}
    for key in keys:
        seen: set[Key] = set()
        waiting = [key]
        while waiting:
            for target in after[waiting.pop()] - seen:
                seen.add(target)
                waiting.append(target)
        reached[key] = seen
    return reached
