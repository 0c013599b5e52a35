"""Arguments of schedule names: `interleaved_1f1b(v=2)`, `zero_bubble(h2)`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ppdsl.diagnostics import Diagnostic

__all__ = ["Argument", "Parameter", "bind_arguments", "split_name"]

Argument = int | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """What a family lets the user choose.

    Attributes:
        name: What users write before `=`.
        choices: The words it may be; empty: a whole number, at least 1.
        default: What it is when nobody says; None: follows from the sizes.
        summary: A few words for lists and help.
    """

    name: str
    choices: tuple[str, ...] = ()
    default: Argument | None = None
    summary: str = ""

    @property
    def example(self) -> str:
        """How the parameter may be written."""
        return " | ".join(self.choices) if self.choices else f"{self.name}=2"


_FORM = re.compile(r"\s*([^()]*?)\s*(?:\(([^()]*)\)\s*)?")


def split_name(text: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """Return the name and the arguments that `text` writes, or None when it has another form.

    An argument without `=` has an empty name.

    >>> split_name("interleaved_1f1b(v=2)"), split_name("zero_bubble( h2 )"), split_name("gpipe"), split_name("a(b")
    (('interleaved_1f1b', (('v', '2'),)), ('zero_bubble', (('', 'h2'),)), ('gpipe', ()), None)
    """
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    name, inside = match.groups()
    pairs = []
    for part in (inside or "").split(","):
        if part.strip():
            key, sign, value = part.partition("=")
            pairs.append((key.strip(), value.strip()) if sign else ("", key.strip()))
    return name, tuple(pairs)


def bind_arguments(
    family: str, parameters: Iterable[Parameter], given: Iterable[tuple[str, Argument]]
) -> tuple[Mapping[str, Argument], tuple[Diagnostic, ...]]:
    """Return the values that arguments give to parameters, in the parameters' order, and what is wrong with them.

    Args:
        family: The family's name, for messages.
        parameters: What the family takes.
        given: Names and values as written; an argument without a name goes to the first free parameter that can take
            it.

    >>> values, findings = bind_arguments("zero_bubble", [Parameter("variant", ("h1", "h2"))], [("", "h2")])
    >>> dict(values), findings
    ({'variant': 'h2'}, ())
    """
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Argument] = {}
    findings: list[Diagnostic] = []
    for key, value in given:
        free = [parameter for name, parameter in known.items() if name not in values]
        name = key.strip().casefold() or _meant(free, value)
        parameter = known.get(name)
        if parameter is None:
            findings.append(_unknown(family, known, key, value))
        elif name in values:
            message = f"Schedule {family!r} gets {name!r} twice: {values[name]!r} and {value!r}."
            findings.append(Diagnostic("argument-twice", message, help="write it once"))
        else:
            read = _read(parameter, value)
            if read is None:
                findings.append(_unfit(family, parameter, value))
            else:
                values[name] = read
    return {name: values[name] for name in known if name in values}, tuple(findings)


def _meant(free: list[Parameter], value: Argument) -> str:
    """Return the first parameter that can take the value, else the first one: its finding says what would be right."""
    fits = (parameter.name for parameter in free if _read(parameter, value) is not None)
    return next(fits, free[0].name if free else "")


def _read(parameter: Parameter, value: Argument) -> Argument | None:
    if parameter.choices:
        word = str(value).strip().casefold()
        return word if word in parameter.choices else None
    if isinstance(value, str):
        # Digits of other scripts are numbers for int(), and a surprise for everybody else.
        value = int(value) if value.isascii() and value.isdecimal() else 0
    return value if value >= 1 else None


def _unfit(family: str, parameter: Parameter, value: Argument) -> Diagnostic:
    if parameter.choices:
        wanted = f"one of {', '.join(parameter.choices)}"
        near = difflib.get_close_matches(str(value).casefold(), parameter.choices, n=1, cutoff=0.5)
        word = near[0] if near else parameter.choices[0]
        help_text = f"did you mean {family}({word})?" if near else f"write for example {family}({word})"
    else:
        wanted, help_text = "a whole number from 1", f"write for example {family}({parameter.name}=2)"
    message = f"Argument {parameter.name!r} of schedule {family!r} is {wanted}. Found {str(value)!r}."
    return Diagnostic("bad-argument", message, help=help_text)


def _unknown(family: str, known: Mapping[str, Parameter], key: str, value: Argument) -> Diagnostic:
    written = f"{key!r}" if key else f"{str(value)!r}"
    message = f"Schedule {family!r} has no argument {written}."
    if not known:
        return Diagnostic("unknown-argument", message, help=f"it takes no arguments; write {family}")
    near = difflib.get_close_matches(key.casefold(), known, n=1, cutoff=0.5) if key else []
    forms = ", ".join(f"{family}({parameter.example})" for parameter in known.values())
    help_text = f"did you mean {near[0]!r}? write {forms}" if near else f"write {forms}"
    return Diagnostic("unknown-argument", message, help=help_text)
