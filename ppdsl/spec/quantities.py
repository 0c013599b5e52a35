"""Literals with a meaning: sizes, counts, shares."""

from __future__ import annotations

import re

from ppdsl.source import Span
from ppdsl.spec.context import LIMIT, Context
from ppdsl.spec.keywords import COUNT_UNITS, SIZE_UNITS
from ppdsl.spec.terms import Binary, Literal, LiteralKind, Name, Negative, Number
from ppdsl.units import Bytes

__all__ = ["bound_of", "bytes_of", "factor_of"]

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(\w+)")


def bytes_of(node: object, span: Span, context: Context) -> Bytes | None:
    """Return a size, or None after a finding."""
    if isinstance(node, Literal) and node.kind is LiteralKind.QUANTITY:
        found = _quantity(node, SIZE_UNITS, "size unit", context)
        return None if found is None else Bytes(round(found))
    if isinstance(node, Number | Name | Negative | Binary):
        if context.value(node) is not None:
            context.report("missing-unit", "A size needs a unit.", node.span, help="write it as in 80GiB or 512MiB")
        return None
    context.report("wrong-value", "A size is a number with a unit.", span, help="write it as in 80GiB or 512MiB")
    return None


def factor_of(node: object, span: Span, context: Context) -> float | None:
    """Return a weight: a number above 0, or None after a finding."""
    found: float | None = None
    if isinstance(node, Literal) and node.kind is LiteralKind.DECIMAL:
        found = float(node.text[:40])
    elif isinstance(node, Number | Name | Negative | Binary):
        found = context.value(node)
    if found is not None and not 0 < found <= LIMIT:
        context.report("wrong-value", f"A weight is a number above 0, not {found:g}.", span)
        return None
    return found


def bound_of(node: object, kind: str, measure: str, span: Span, context: Context) -> float | None:
    """Return the bound of an expectation as a plain number, or None after a finding.

    Args:
        node: As written.
        kind: `number`, `share`, `bytes` or `count`.
        measure: What is measured, for messages.
        span: Where the bound stands.
        context: Takes findings.
    """
    if isinstance(node, Number | Name | Negative | Binary):
        number = context.value(node)
        if number is None or kind in {"number", "count"} or (kind == "share" and 0 <= number <= 1):
            return number
        example = "12%" if kind == "share" else "40GiB"
        message = f"The bound of `{measure}` needs a unit."
        context.report("missing-unit", message, span, help=f"write it as in {example}")
        return None
    if not isinstance(node, Literal):
        return None
    match (node.kind, kind):
        case (LiteralKind.PERCENT, "share"):
            return _bounded(float(node.text[:-1][:40]) / 100, span, context)
        case (LiteralKind.DECIMAL, "share" | "number"):
            return _bounded(float(node.text[:40]), span, context)
        case (LiteralKind.QUANTITY, "bytes"):
            return _quantity(node, SIZE_UNITS, "size unit", context)
        case (LiteralKind.QUANTITY, "count"):
            return _quantity(node, COUNT_UNITS, "unit of counts", context)
        case _:
            pass
    wanted = {"share": "a share such as 12%", "number": "a number", "bytes": "a size such as 40GiB"}
    message = f"The bound of `{measure}` is {wanted.get(kind, 'a count such as 200M')}, not `{node.text[:40]}`."
    context.report("wrong-value", message, span)
    return None


def _bounded(found: float, span: Span, context: Context) -> float | None:
    if found <= LIMIT:
        return found
    context.report("number-too-large", f"The number is larger than {LIMIT}.", span)
    return None


def _quantity(node: Literal, units: dict[str, int], what: str, context: Context) -> float | None:
    matched = _QUANTITY.fullmatch(node.text)
    if matched is None:
        context.report("wrong-value", "This is no number with a unit.", node.span)
        return None
    number, unit = matched.groups()
    if unit not in units:
        context.unknown("unknown-unit", what, unit, units, node.span)
        return None
    whole = int(number) * units[unit] if number.isdigit() and len(number) < 30 else float(number[:300]) * units[unit]
    return _bounded(whole, node.span, context)
