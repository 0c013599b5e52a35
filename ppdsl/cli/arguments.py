"""Arguments that several commands share, and the values they take."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ppdsl.cli.output import WrongUseError
from ppdsl.diagnostics import Diagnostic

__all__ = [
    "Options", "Room", "add_model", "add_parameters", "add_spec", "add_width", "number_from_one",
    "parameters_of", "ranks", "room", "time", "width",
]  # fmt: skip

_PARAMETER = re.compile(r"\s*(\w+)\s*=\s*(-?[0-9]{1,18})\s*")


class Options(Protocol):
    """What options are added to: a parser, or a group of one."""

    def add_argument(self, *names: str, **settings: Any) -> Any:
        """Add an option."""
        ...


def add_model(parser: Options, *, required: bool) -> None:
    """Add `--model`."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="MODULE:FUNCTION",
        help="function that returns (model, args) or (model, args, kwargs), in a module or a .py file",
    )


def add_parameters(parser: Options) -> None:
    """Add `-D`."""
    parser.add_argument(
        "-D", dest="parameters", metavar="NAME=NUMBER", action="append", default=[], help="value of a spec's parameter"
    )


def add_spec(parser: Options) -> None:
    """Add `--spec` and `-D`."""
    parser.add_argument("--spec", metavar="FILE.ppspec", help="divide the model by this spec, not by its marks")
    add_parameters(parser)


def parameters_of(given: Iterable[str]) -> dict[str, int]:
    """Return the values of `-D NAME=NUMBER` options.

    Raises:
        WrongUseError: One has another form, or comes twice.

    >>> parameters_of(["ranks=8"])
    {'ranks': 8}
    """
    found: dict[str, int] = {}
    for text in given:
        matched = _PARAMETER.fullmatch(text)
        if matched is None:
            message = f"`-D {text}` gives no whole number to a parameter."
            raise WrongUseError(Diagnostic("wrong-parameter", message, help="write it as in -D ranks=8"))
        if matched[1] in found:
            raise WrongUseError(Diagnostic("wrong-parameter", f"`-D` gives `{matched[1]}` twice."))
        found[matched[1]] = int(matched[2])
    return found


def add_width(parser: Options) -> None:
    """Add `--width`."""
    parser.add_argument("--width", type=width, help="columns of drawings (default: the terminal's)")


def number_from_one(text: str) -> int:
    """Return a count.

    Raises:
        ArgumentTypeError: It is below 1.
    """
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return number


def width(text: str) -> int:
    """Return columns to draw in.

    Raises:
        ArgumentTypeError: They are too few.
    """
    number = int(text)
    if number < 40:
        raise ArgumentTypeError(f"{text} is too narrow to draw in; use at least 40")
    return number


def ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a list of numbers and ranges names, ascending.

    Raises:
        ArgumentTypeError: It is no such list.

    >>> ranks("60-63,0")
    (0, 60, 61, 62, 63)
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ArgumentTypeError(f"{text} is no list of ranks; write for example 0-3,60-63")
        found.update(range(int(first), int(last or first) + 1))
    if not found:
        raise ArgumentTypeError(f"{text} names no rank; write for example 0-3,60-63")
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank may hold.

    Attributes:
        amount: How much.
        bytes: Whether it is bytes; else activations.
    """

    amount: float
    bytes: bool


_SIZES = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def room(text: str) -> Room:
    """Return what a rank may hold: a number of activations, or a size.

    Raises:
        ArgumentTypeError: It is neither, or not above 0.

    >>> room("6"), room("1.5GiB")
    (Room(amount=6.0, bytes=False), Room(amount=1610612736.0, bytes=True))
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([KMGT]iB|B|)\s*", text)
    if match is None or not float(match[1]):
        raise ArgumentTypeError(f"{text} is no amount of memory; write activations as in 6, or a size as in 40GiB")
    return Room(float(match[1]) * _SIZES[match[2]], bytes=bool(match[2]))


def time(text: str) -> float:
    """Return a time that is neither negative nor without end.

    Raises:
        ArgumentTypeError: It is not.
    """
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"{text} is no time")
    return number
