"""The stage in force while a model runs, and marks that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ppdsl.annotate import Key, MarkKind, ModuleMark, marks
from ppdsl.diagnostics import Diagnostic, Label, MarkError
from ppdsl.recording.tape import PassedCutpoint
from ppdsl.source import Place, Span

__all__ = ["MarkState"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A cutpoint that was passed, with the number of records before it."""

    place: Place
    records: int


class MarkState:
    """Hears marks for a recorder.

    Attributes:
        base: The stage of code outside every block: None with blocks alone, 0 at the start with begin marks and
            cutpoints, then whatever the last of them said.
        spans: Where each key was marked first.
        cutpoints: Cutpoints that were passed, optional ones too.
        ignored: Where marks were passed without effect, because a spec divides the model.

    Args:
        recorder: Whose records get the stages.
        heeded: Whether marks have their effect; cutpoints are noted in any case.
    """

    def __init__(self, recorder: Any, *, heeded: bool = True) -> None:
        self._recorder = recorder
        self._heeded = heeded
        self._stack: list[tuple[Key, Span]] = []
        self._cuts: list[_Cut] = []
        self._block: Span | None = None
        laid = marks(recorder.model)
        self._laid = laid if heeded else ()
        self._reached: set[tuple[str, int | None, str]] = set()
        self._containers = _containers(recorder.model, self._laid)
        self._begun: dict[Key, Span] = {}
        self.base: Key | None = 0 if any(mark.kind is MarkKind.BEGIN for mark in self._laid) else None
        self.spans: dict[Key, Span] = {}
        self.cutpoints: list[PassedCutpoint] = []
        self.ignored: list[Span] = [] if heeded else [mark.span for mark in laid]

    @property
    def stage(self) -> Key | None:
        """The stage of what runs now; None for code outside every mark."""
        return self._stack[-1][0] if self._stack else self.base

    def inside(self, module: Any) -> bool:
        """Whether a mark was laid on something inside `module`."""
        return id(module) in self._containers

    # -- marks in the model's code ------------------------------------------------------------------------------------

    def enter_stage(self, key: Key, place: Place) -> None:
        """A block begins."""
        span = place.span
        if not self._heeded:
            self.ignored.append(span)
            return
        if self._cuts:
            raise _mixed(span, self._cuts[0].place.span)
        self._block = self._block or span
        self._note(key, span)
        self._stack.append((key, span))

    def exit_stage(self) -> None:
        """The innermost block ends."""
        if self._stack:
            self._stack.pop()

    def pass_cutpoint(self, name: str | None, optional: bool, place: Place) -> None:
        """A cutpoint is passed."""
        self.cutpoints.append(PassedCutpoint(name, optional, len(self._recorder.records), place))
        if optional or not self._heeded:
            return
        span = place.span
        if self._block is not None:
            raise _mixed(self._block, span)
        if self._laid:
            raise _mixed(self._laid[0].span, span)
        made = len(self._recorder.records)
        if not self._cuts and made == 0:
            raise _useless(
                "leading-mark", "This cutpoint comes before the first operation, so there is nothing to cut off.", span
            )
        if self._cuts and self._cuts[-1].records == made:
            raise MarkError(
                Diagnostic(
                    "adjacent-marks",
                    "Nothing runs between these two cutpoints.",
                    (Label(span), Label(self._cuts[-1].place.span, "the one before")),
                    "remove one of them",
                )
            )
        self._cuts.append(_Cut(place, made))
        self._mark_frames()
        self.base = len(self._cuts)
        self.spans.setdefault(self.base, span)

    # -- marks on modules ---------------------------------------------------------------------------------------------

    @contextmanager
    def around(self, module: Any, laid: tuple[ModuleMark, ...], call: int) -> Iterator[None]:
        """Apply the marks laid on `module` to its call number `call`."""
        mark = next((m for m in laid if m.call == call), next((m for m in laid if m.call is None), None))
        if mark is None or not self._heeded:
            yield
            return
        self._reached.add((str(mark.span), mark.call, mark.kind.value))
        if mark.kind is MarkKind.BEGIN:
            self._begin(mark)
            yield
            return
        self._note(mark.key, mark.span)
        self._stack.append((mark.key, mark.span))
        try:
            yield
        finally:
            self._stack.pop()

    def _begin(self, mark: ModuleMark) -> None:
        if self._stack:
            raise MarkError(
                Diagnostic(
                    "begin-in-block",
                    f"Stage {mark.key} begins inside the block of stage {self._stack[-1][0]}, which ends "
                    "before it could.",
                    (Label(mark.span), Label(self._stack[-1][1], "the block")),
                    "use pp.place for modules inside a block",
                )
            )
        if mark.key == self.base and mark.key in self._begun:
            return
        if mark.key != self.base and mark.key in self._begun:
            raise MarkError(
                Diagnostic(
                    "begin-again",
                    f"Stage {mark.key} begins again after stage {self.base} had begun: its module is called "
                    "more than once.",
                    (Label(mark.span),),
                    "say which call is meant, pp.begin(module, key, call=0), or use pp.place",
                )
            )
        self._begun[mark.key] = mark.span
        self._note(mark.key, mark.span)
        self.base = mark.key

    # -- at the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Report marks that were never reached or that changed nothing; number code before the first cutpoint."""
        records = self._recorder.records
        for mark in self._laid:
            if (str(mark.span), mark.call, mark.kind.value) not in self._reached:
                which = "" if mark.call is None else f" a {mark.call + 1}. time"
                raise MarkError(
                    Diagnostic(
                        "unreached-mark",
                        f"Module `{mark.module}` is marked, but forward never calls it{which}.",
                        (Label(mark.span),),
                        "mark a module that is called (a ModuleList is not), or pp.unmark(model)",
                    )
                )
        if self._cuts:
            for record in records:
                record.stage = 0 if record.stage is None else record.stage
            if self._cuts[-1].records == len(records):
                raise _useless(
                    "trailing-mark",
                    "Nothing runs after this cutpoint, so there is no next stage.",
                    self._cuts[-1].place.span,
                )
        used = {record.stage for record in records}
        for key, span in self.spans.items():
            if key not in used:
                raise _useless("empty-stage", f"Stage {key} is marked, but nothing runs in it.", span)

    # -- shared ------------------------------------------------------------------------------------------------------

    def _note(self, key: Key, span: Span) -> None:
        self._mark_frames()
        self.spans.setdefault(key, span)
        for other, first in self.spans.items():
            if type(other) is not type(key) and str(other) == str(key):
                raise MarkError(
                    Diagnostic(
                        "ambiguous-key",
                        f"Stage {key!r} and stage {other!r} are two stages that read the same.",
                        (Label(span), Label(first, "the other one")),
                        "use one spelling",
                    )
                )

    def _mark_frames(self) -> None:
        frame = self._recorder.frames.current
        while frame is not None and not frame.marked:
            frame.marked = True
            frame = frame.parent


def _containers(model: Any, laid: tuple[ModuleMark, ...]) -> set[int]:
    """Ids of modules that have a marked module somewhere inside."""
    marked = [mark.module for mark in laid]
    prefixes = {name.rpartition(".")[0] for name in marked if name}
    for name in list(prefixes):
        while name:
            name = name.rpartition(".")[0]
            prefixes.add(name)
    return {id(module) for name, module in model.named_modules() if name in prefixes} if marked else set()


def _mixed(block: Span, cut: Span) -> MarkError:
    return MarkError(
        Diagnostic(
            "mixed-marks",
            "Cutpoints number the stages themselves, so they cannot be mixed with stages that are named by a key.",
            (Label(cut), Label(block, "a stage with a key")),
            "use one kind of mark in a model",
        )
    )


def _useless(code: str, message: str, span: Span) -> MarkError:
    return MarkError(Diagnostic(code, message, (Label(span),), "remove it"))
