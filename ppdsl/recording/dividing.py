"""Divide a recording by a spec instead of by marks: before anything else looks at the stages of its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from ppdsl.annotate import Key
from ppdsl.diagnostics import Diagnostic, Label, Severity, SpecError
from ppdsl.graph.outline import Assignment, ModelOutline
from ppdsl.recording.findings import labels_of
from ppdsl.recording.outline import module_frames, outline_of
from ppdsl.recording.tape import Frame, Message, Tape
from ppdsl.source import Span
from ppdsl.spec.partition import AtCutpoint, Difference, Partition, Selection
from ppdsl.spec.resolve import Resolution, resolve

__all__ = ["Divider", "Division", "apply_assignment", "division_like", "ignored_marks", "undivided"]

Division: TypeAlias = Partition | Callable[[ModelOutline], Assignment]
"""A spec, or a function that gives each step of an outline its stage."""


class Divider:
    """Gives the records of each recording the stages that a spec declares.

    Args:
        model: The recorded model.
        division: The spec.
        costs: Seconds by module name, for a spec that balances by measured time.

    Attributes:
        outline: Of the latest recording.
        resolution: What the spec came to on it; None when the stages were given.
    """

    def __init__(self, model: torch.nn.Module, division: Division, costs: Mapping[str, float] | None = None) -> None:
        self._model = model
        self._division = division
        self._costs = costs
        self.outline: ModelOutline | None = None
        self.resolution: Resolution | None = None

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """What was noticed when the spec was resolved."""
        return () if self.resolution is None else self.resolution.warnings

    def divide(self, tape: Tape, messages: Sequence[Message]) -> dict[Key, Span]:
        """Give each record and call its stage; return where each stage is declared.

        Raises:
            SpecError: The spec does not fit the model.
        """
        outline = outline_of(tape, self._model)
        if not isinstance(self._division, Partition):
            assignment = self._division(outline)
        else:
            if self.resolution is None or outline != self.outline:
                try:
                    self.resolution = resolve(self._division, outline, self._costs)
                except SpecError as error:
                    raise SpecError(*error.diagnostics, *_whole_calls(tape)) from None
            assignment = self.resolution.assignment
        self.outline = outline
        apply_assignment(tape, messages, assignment)
        return dict(zip(assignment.keys, assignment.spans, strict=True))


def apply_assignment(tape: Tape, messages: Sequence[Message], assignment: Assignment) -> None:
    """Give each record, call and message of a recording its stage.

    Raises:
        SpecError: The assignment was made for another recording.
    """
    frames = list(module_frames(tape))
    if (len(assignment.steps), len(assignment.calls)) != (len(tape.records), len(frames)):
        raise SpecError(
            Diagnostic(
                "other-recording",
                f"The stages were worked out for {len(assignment.steps)} steps in {len(assignment.calls)} calls, but "
                f"forward makes {len(tape.records)} steps in {len(frames)} calls.",
                help="work them out from the spec again",
            )
        )
    for record, key in zip(tape.records, assignment.steps, strict=True):
        record.stage = key
    for frame, key in zip(frames, assignment.calls, strict=True):
        frame.stage = key
    tape.divided, tape.repeated = True, assignment.repeated
    for message in messages:
        before = tape.records[message.records - 1].stage if message.records > 0 else None
        message.stage = message.frame.stage if message.frame.stage is not None else before


def division_like(recording: _Recorded) -> Division | None:
    """Return what divides the same model, called with other shapes, as it was divided; None where marks did.

    A spec that balances stages by their cost would otherwise move a border with the shapes.
    """
    resolution = recording.resolution
    if resolution is None:
        return None
    partition, assignment = resolution.partition, resolution.assignment

    def divide(outline: ModelOutline) -> Assignment:
        if (len(outline.steps), len(outline.calls)) == (len(assignment.steps), len(assignment.calls)):
            return assignment
        return resolve(partition, outline).assignment

    return divide


class _Recorded(Protocol):
    """A recording."""

    @property
    def resolution(self) -> Resolution | None:
        """What its spec came to."""


def undivided(outline: ModelOutline) -> Assignment:
    """Return an assignment without stages: the whole recording is one."""
    return Assignment((), (None,) * len(outline.steps), (None,) * len(outline.calls), ())


def ignored_marks(ignored: Sequence[Span], division: Division | None, tape: Tape) -> tuple[Diagnostic, ...]:
    """Return one warning when the code holds marks that had no effect.

    Args:
        ignored: Where `pp.stage`, `pp.begin` and `pp.place` were met.
        division: The spec; the cutpoints that it names are not ignored.
        tape: The recording, with the cutpoints that forward passed.
    """
    named = set(_named_cutpoints(division)) if isinstance(division, Partition) else set()
    cuts = [cut.place.span for cut in tape.cutpoints if not cut.optional and cut.name not in named]
    places = list(dict.fromkeys([*ignored, *cuts]))
    if not places:
        return ()
    what = "a stage mark" if len(places) == 1 else f"{len(places)} stage marks"
    return (
        Diagnostic(
            "marks-ignored",
            f"The spec divides the model, so {what} in its code had no effect.",
            (Label(places[0]),),
            "remove the marks, or record without a spec",
            Severity.WARNING,
        ),
    )


def _named_cutpoints(partition: Partition) -> Iterator[str]:
    pending: list[Selection] = [member for stage in partition.stages for member in stage.members]
    pending += [selection for split in partition.splits for selection in split.selections]
    pending += [cut.selection for cut in partition.cuts]
    while pending:
        selection = pending.pop()
        if isinstance(selection, Difference):
            pending += [selection.left, selection.right]
        elif isinstance(selection, AtCutpoint):
            yield selection.name


def _whole_calls(tape: Tape) -> Iterator[Diagnostic]:
    """Notes on calls that a spec cannot look into: perhaps it names a module inside one."""
    seen: set[str] = set()
    pending: list[Frame] = [tape.root]
    while pending:
        frame = pending.pop()
        pending += [part for part in frame.parts if isinstance(part, Frame)]
        if frame.forced and any(True for _ in frame.module.children()) and frame.name not in seen:
            seen.add(frame.name)
            yield Diagnostic(
                "whole-call",
                f"Module `{frame.name or type(frame.module).__name__}` decides by numbers what it does, so it can only "
                "be called whole: no spec can name a module inside it.",
                labels_of(frame.place),
                severity=Severity.NOTE,
            )
