"""Findings in specs: the failing files of `tests/spec`, whose texts are compared there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.spec.catalogue import INVALID, WITHOUT_FILE
from tests.spec.test_resolve_messages import GOLDEN

__all__ = ["SpecExample", "spec_examples"]

_LONGEST = 60
"""Lines of an example that a reader still looks at."""


@dataclass(frozen=True, slots=True)
class SpecExample:
    """A spec and what is said about it; `model` names what it is held against."""

    text: str
    said: str
    model: str | None = None


def spec_examples() -> dict[str, SpecExample]:
    """Return an example for each code: of the file alone where there is one, else with a model."""
    found: dict[str, SpecExample] = {}
    for section in GOLDEN.read_text(encoding="utf-8").split("=" * 80 + "\n"):
        head, _, rest = section.partition("\n")
        text, _, said = rest.partition("\n\n" if "\n\nerror" in rest or "\n\nwarning" in rest else "\0")
        match = re.fullmatch(r"(\S+) \(([\w ]+)\)", head)
        if match is None:
            raise ValueError(head)
        found.setdefault(match[1], SpecExample(text, said, match[2]))
    for path in INVALID:
        text = path.read_bytes().decode("utf-8", errors="backslashreplace")
        said = path.with_suffix(".txt").read_text(encoding="utf-8")
        found[path.stem] = SpecExample(_shortened(text), _shortened(said))
    for code, why in WITHOUT_FILE.items():
        found.setdefault(code, SpecExample(f"# {why}", "(see tests/spec)"))
    return found


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= _LONGEST:
        return text
    half = _LONGEST // 4
    return "\n".join([*lines[:half], "...", *lines[-half:]])
