"""Assignments written by hand: what a resolved spec would say, from the names of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ppdsl.graph.outline import Assignment, ModelOutline
from ppdsl.source import Span

Key = int | str


def by_module(
    stages: Mapping[str, Key], *, repeated: tuple[str, ...] = (), seen: list[ModelOutline] | None = None
) -> Callable[[ModelOutline], Assignment]:
    """Give the calls of these modules, with what they call, to these stages; `block#1` is the second call of `block`.

    Args:
        stages: For each module its stage.
        repeated: Modules that run in every stage that needs them.
        seen: Gets each outline that is divided.
    """
    keys = tuple(dict.fromkeys(stages.values()))

    def assign(outline: ModelOutline) -> Assignment:
        if seen is not None:
            seen.append(outline)

        def stage_of(index: int | None) -> Key | None:
            while index is not None:
                call = outline.calls[index]
                if call.module in repeated:
                    return None
                for name in (f"{call.module}#{call.number}", call.module):
                    if name in stages:
                        return stages[name]
                index = call.parent
            return None

        steps = tuple(stage_of(step.call) for step in outline.steps)
        calls = tuple(stage_of(call.index) for call in outline.calls)
        spans = tuple(Span("net.ppspec", line, 1, line, 9) for line, _ in enumerate(keys, start=1))
        again = {i for call in outline.calls if call.module in repeated for i in range(call.start, call.end)}
        return Assignment(keys, steps, calls, spans, frozenset(again))

    return assign
