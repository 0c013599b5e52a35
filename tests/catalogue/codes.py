"""Which codes the source can report: all its texts that look like one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

__all__ = ["codes_in_source"]

_PACKAGE = Path(__file__).resolve().parents[2] / "ppdsl"
_SINGLE_WORDS = ("deadlock", "interrupted", "syntax")
_OTHER_TEXTS = frozenset({"micro-batch", "micro-batches", "ppdsl-store", "ppdsl-watch", "utf-8"})
"""Texts with hyphens that are no codes."""


def codes_in_source() -> dict[str, str]:
    """Return each code with the file that reports it."""
    found: dict[str, str] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_code(node.value):
                found.setdefault(node.value, str(file.relative_to(_PACKAGE.parent)))
    # Made from a part: "missing-" and the kind of step.
    found.update({f"missing-{kind}": "ppdsl/plan/verify.py" for kind in ("recv", "send", "wait")})
    return found


def _is_code(text: str) -> bool:
    return text in _SINGLE_WORDS or (
        re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", text) is not None and text not in _OTHER_TEXTS
    )
