"""Numbers with names, and how people read them: bytes, seconds, floating-point operations."""

from __future__ import annotations

from typing import NewType

__all__ = [
    "Bytes",
    "Flops",
    "Microbatch",
    "Rank",
    "Seconds",
    "StageIndex",
    "counted",
    "format_bytes",
    "format_count",
    "format_flops",
    "format_seconds",
]

StageIndex = NewType("StageIndex", int)
Rank = NewType("Rank", int)
Microbatch = NewType("Microbatch", int)
Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)
Flops = NewType("Flops", int)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    >>> counted(1, "edge"), counted(0, "edge"), counted(8, "micro-batch")
    ('1 edge', '0 edges', '8 micro-batches')
    """
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def format_bytes(count: float) -> str:
    """Return a size in binary units, three significant digits.

    >>> format_bytes(512), format_bytes(3 * 2**20), format_bytes(80 * 2**30)
    ('512 B', '3 MiB', '80 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def format_count(count: float) -> str:
    """Return a count with a decimal suffix, three significant digits.

    >>> format_count(950), format_count(124_000_000)
    ('950', '124M')
    """
    for suffix in ("", "K", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.4g}T"


def format_flops(count: float) -> str:
    """Return a number of floating-point operations with its unit.

    >>> format_flops(2_500_000)
    '2.5 MFLOP'
    """
    text = format_count(count)
    digits = text.rstrip("KMGT")
    return f"{digits} {text[len(digits) :]}FLOP"


def format_seconds(seconds: float) -> str:
    """Return a duration in the unit that keeps it readable.

    >>> format_seconds(0.0000125), format_seconds(0.0312), format_seconds(2.0)
    ('12.5 us', '31.2 ms', '2 s')
    """
    magnitude = abs(seconds)
    if magnitude < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if magnitude < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"
