"""What to say when a text does not follow the grammar: names of terminals become what one types."""

from __future__ import annotations

from collections.abc import Collection

from ppdsl.diagnostics import Diagnostic, Label
from ppdsl.source import Span
from ppdsl.spec.keywords import ITEM_WORDS
from ppdsl.spec.suggest import nearest

__all__ = ["TYPED", "syntax_error"]

TYPED = {
    "NAME": "a name", "INT": "a whole number", "STRING": '"text"', "REGEX": "/regex/", "DECIMAL": "a decimal number",
    "QUANTITY": "a number with a unit", "PERCENT": "12%", "ACTION": "0F0", "ACTION_OPEN": "0F[", "KIND_OPEN": "F[",
    "COMPARE": "<=", "POLICY": "sync", "TYPE": "type(", "CALL": "call(", "CUT_OF": "cut(",
    "LBRACE": "{", "RBRACE": "}", "LSQB": "[", "RSQB": "]", "LPAR": "(", "RPAR": ")", "COMMA": ",", "COLON": ":",
    "DOT": ".", "EQUAL": "=", "AT_SIGN": "@", "PLUS": "+", "MINUS": "-", "STAR": "*", "DOUBLE_STAR": "**",
    "DOUBLE_SLASH": "//", "PERCENT_SIGN": "%", "ARROW": "->", "RANGE": "..<", "$END": "the end of the file",
}  # fmt: skip
"""What one types for a terminal of the grammar; a keyword is typed as its name in small letters."""

# What the grammar waits for, and what to say then; the first that fits. An item's first words are looked at before.
_SENTENCES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"COMMA", "RBRACE", "DOT"}), "Modules are separated by commas."),
    (frozenset({"INTO"}), "A split says `into` how many parts."),
    (frozenset({"BY"}), "A split says what it is balanced `by`."),
    (frozenset({"AS", "DOT"}), "A cut ends with `as` a name or `@` a rank."),
    (frozenset({"AS"}), "A split says what its stages are called: `as name[i]`."),
    (frozenset({"BEFORE", "AFTER", "AT"}), "A cut is `before`, `after` or `at` something."),
    (frozenset({"LBRACE", "AT_SIGN"}), "The modules of a stage stand between braces."),
    (frozenset({"ARROW"}), "Edges are written `a -> b`."),
    (frozenset({"COMPARE"}), "An expectation compares, for example with `<=`."),
    (frozenset({"RANGE"}), "A range is written `0..<4`."),
    (frozenset({"IN"}), "A family is written `name[i in 0..<4]`."),
    (frozenset({"TYPE", "NAME", "STAR"}), "A module is missing."),
    (frozenset({"ACTION", "RANK"}), "Actions are written as in 0F0."),
    (frozenset({"RANK"}), "A row of an order begins with `rank`."),
    (frozenset({"INT", "NAME", "LPAR"}), "A value is missing."),
    (frozenset({"STRING"}), "A path stands between double quotes."),
    (frozenset({"COMMA", "RBRACE"}), "Entries are separated by commas."),
    (frozenset({"EQUAL", "LBRACE"}), "A setting needs `=` and a value."),
    (frozenset({"EQUAL"}), "Here `=` is missing."),
    (frozenset({"LBRACE"}), "Here `{` is missing."),
    (frozenset({"RPAR"}), "Here `)` is missing."),
    (frozenset({"RSQB"}), "Here `]` is missing."),
    (frozenset({"NAME"}), "A name is missing."),
    (frozenset({"INT"}), "A whole number is missing."),
)
_LISTED = 14


def syntax_error(
    found: str,
    expected: Collection[str],
    span: Span,
    before: str = "",
    item: str = "",
    *,
    options: bool = False,
    start: Span | None = None,
) -> Diagnostic:
    """Return the finding for a word where the grammar wants another.

    Args:
        found: The word; empty for the end of the file.
        expected: The terminals that could stand here.
        span: Where the word stands.
        before: The word before it.
        item: The first word of the item it stands in.
        options: Whether it stands among the options behind `with`.
        start: Where the item begins.
    """
    shown = f"`{_shortened(found)}`" if found else "the end of the file"
    if item and before == item and item not in ITEM_WORDS and set(expected) <= {"EQUAL", "LBRACE"}:
        near = nearest(item, ITEM_WORDS)
        meant = f"did you mean `{near}`?" if near else "write `name = value` for a setting"
        return Diagnostic("syntax", f"Nothing begins with `{_shortened(item)}`.", (Label(start or span),), meant)
    if expected and {"STAGE", "PARAM"} <= set(expected) and "COMMA" not in expected and "DOT" not in expected:
        near = nearest(found, ITEM_WORDS) if found else None
        meant = f"did you mean `{near}`?" if near and near != found else f"one of: {'  '.join(ITEM_WORDS)}"
        message = f"A stage, a setting or another item begins here. Found {shown}."
        return Diagnostic("syntax", message, (Label(span),), meant)
    wanted = frozenset(expected)
    if item == "stage" and wanted == {"COMMA", "RBRACE"} and not options:
        wanted |= {"DOT"}
    sentence = next((text for needed, text in _SENTENCES if needed <= wanted), "This cannot stand here.")
    typed = list(dict.fromkeys(TYPED.get(name, name.lower()) for name in sorted(wanted, key=_order)))
    more = [] if len(typed) <= _LISTED else ["..."]
    return Diagnostic(
        "syntax",
        f"{sentence} Found {shown}.",
        (Label(span),),
        help=f"one of: {'  '.join([*typed[:_LISTED], *more])}" if typed else None,
    )


def _order(name: str) -> tuple[bool, str]:
    return (name not in TYPED, TYPED.get(name, name.lower()))


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
