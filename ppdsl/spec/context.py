"""What all parts of the check share: findings, the values of names, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.source import Span
from ppdsl.spec.keywords import NOT_SUPPORTED
from ppdsl.spec.suggest import did_you_mean
from ppdsl.spec.terms import Binary, Expression, Name, Negative, Number, Range

__all__ = ["LIMIT", "MAX_STAGES", "Context"]

LIMIT = 10**18
"""No number may be larger than this."""

MAX_STAGES = 4096
"""Nor may a spec have more stages."""


@dataclass
class Context:
    """The check of one spec.

    Attributes:
        folder: Of the main file; None for a text without a file.
        folders: For each file that belongs to the spec its folder.
        complete: Whether all of the text could be parsed; when not, what may be missing only because its item could
            not be read is not reported.
        values: Of parameters and `let`s; None where the value is not known because of another finding.
        used: Names that something reads.
        findings: In the order found.
    """

    folder: Path | None = None
    folders: dict[str, Path | None] = field(default_factory=dict)
    complete: bool = True
    values: dict[str, int | None] = field(default_factory=dict)
    regexes: int = 0  # how many were read
    used: set[str] = field(default_factory=set)
    findings: list[Diagnostic] = field(default_factory=list)
    _seen: set[tuple[str, Span | None]] = field(default_factory=set)

    def report(
        self,
        code: str,
        message: str,
        *labels: Label | Span,
        help: str | None = None,  # noqa: A002
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Add a finding, unless the same code was found at the same place."""
        places = tuple(label if isinstance(label, Label) else Label(label) for label in labels)
        key = (code, places[0].span if places else None)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(Diagnostic(code, message, places, help, severity))

    def folder_of(self, file: str) -> Path | None:
        """Return the folder that paths in a file begin at."""
        return self.folders.get(file, self.folder)

    def unknown(self, code: str, what: str, written: str, known: Collection[str], span: Span) -> None:
        """Report a word that is none of those known."""
        meant = did_you_mean(written, known)
        names = ", ".join(f"`{name}`" for name in known)
        help_text = meant or (f"one of: {names}" if names else None)
        self.report(code, f"There is no {what} `{written}`.", span, help=help_text)

    def unsupported(self, kind: str, name: str, span: Span) -> bool:
        """Report what the language can say but nothing obeys yet; return whether it is such a thing."""
        reason = NOT_SUPPORTED.get((kind, name))
        if reason is not None:
            shown, help_text = f"`{name}`", "leave it out"
            if kind == "recompute":
                shown, help_text = "Recomputing single modules", "write `recompute = full`"
            if kind == "placement":
                shown, help_text = "Placing a stage on several ranks", "name one rank"
            self.report("not-supported", f"{shown} is not supported: {reason}.", span, help=help_text)
        return reason is not None

    # ------------------------------------------------------------ arithmetic

    def value(self, node: Expression, local: Mapping[str, int] = {}) -> int | None:
        """Return the value of an expression, or None after a finding."""
        match node:
            case Number(value):
                return value
            case Name(name, span):
                return self._name(name, span, local)
            case Negative(operand):
                inner = self.value(operand, local)
                return None if inner is None else -inner
            case Binary(operator, left, right, span):
                first, second = self.value(left, local), self.value(right, local)
                if first is None or second is None:
                    return None
                return self._binary(operator, first, second, span)

    def range(self, node: Range, local: Mapping[str, int] = {}) -> range | None:
        """Return the numbers of a range, or None after a finding."""
        start, stop = self.value(node.start, local), self.value(node.stop, local)
        return None if start is None or stop is None else range(start, stop)

    def _name(self, name: str, span: Span, local: Mapping[str, int]) -> int | None:
        if name in local:
            return local[name]
        if name in self.values:
            self.used.add(name)
            return self.values[name]
        if self.complete:
            known = [*local, *self.values]
            hint = did_you_mean(name, known) or f"write `param {name} = 1` before the pipeline"
            self.report("undefined-name", f"Nothing is named `{name}`.", span, help=hint)
        return None

    def _binary(self, operator: str, left: int, right: int, span: Span) -> int | None:
        if operator in {"//", "%"} and right == 0:
            self.report("division-by-zero", f"{left} {operator} 0 has no value.", span)
            return None
        if operator == "**" and right < 0:
            self.report("negative-exponent", f"{left} ** {right} is no whole number.", span)
            return None
        if operator == "**" and abs(left) > 1 and right > 64:
            self.report("number-too-large", f"{left} ** {right} is larger than {LIMIT}.", span)
            return None
        found = _OPERATIONS[operator](left, right)
        if abs(found) > LIMIT:
            self.report("number-too-large", f"{left} {operator} {right} is larger than {LIMIT}.", span)
            return None
        return found


def _power(left: int, right: int) -> int:
    # A base of -1, 0 or 1 may have any exponent, and a huge one would still be slow.
    return left**right if abs(left) > 1 else int(left ** (right % 2 or (2 if right else 0)))


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "//": int.__floordiv__,
    "%": int.__mod__,
    "**": _power,
}
