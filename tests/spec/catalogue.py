"""Every code of the front end has a failing example: `invalid/CODE.ppspec`, and beside it what is said about it.

`python -m tests.spec.catalogue` writes the texts anew; read the difference before you keep it.
"""

from __future__ import annotations

import os
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

from ppdsl.diagnostics import SpecError, render_plain
from ppdsl.spec.load import check_spec

HERE = Path(__file__).resolve().parent
INVALID = sorted((HERE / "invalid").glob("*.ppspec"))
VALID = sorted((HERE / "valid").glob("*.ppspec"))

# Codes that no small file can show; each has a test of its own.
WITHOUT_FILE = {
    "spec-too-long": "needs a long file",
    "too-many-includes": "needs many files",
    "no-folder": "of a text that is no file",
    "unreadable-spec": "of a file that cannot be read",
    "not-formatted": "of `ppdsl fmt --check`",
}


def overrides_of(path: Path) -> dict[str, int]:
    first = path.read_bytes().decode(errors="replace").split("\n")[0]
    return {name: int(value) for name, value in re.findall(r"-D (\w+)=(\d+)", first)} if "ppdsl check" in first else {}


def findings_of(path: Path) -> str:
    """What is said about a file, checked from its own folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        return render_plain(check_spec(path.name, overrides_of(path)).diagnostics) + "\n"
    except SpecError as error:
        return f"{error}\n"
    finally:
        os.chdir(before)


def dump(value: object, indent: str = "") -> str:
    """A checked spec as text, without places and without what is not said."""
    if isinstance(value, Path | str | int | float | None):
        return repr(value)
    if isinstance(value, tuple):
        if not any(is_dataclass(one) for one in value):
            return f"({', '.join(map(dump, value))})"
        return "".join(f"\n{indent}  - {dump(one, indent + '    ')}" for one in value)
    if not is_dataclass(value):
        return str(value)
    shown = []
    for field in fields(value):
        inner = getattr(value, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name not in {"span", "spans", "source_digest"} and inner != default and inner not in ((), ""):
            shown.append((field.name, dump(inner, indent + "  ")))
    name = type(value).__name__
    if all("\n" not in text for _, text in shown) and indent:
        return f"{name}({', '.join(f'{key}={text}' for key, text in shown)})"
    return name + "".join(f"\n{indent}{key} = {text}" for key, text in shown)


def partition_of(path: Path) -> str:
    """What a valid file says, checked from its own folder."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        checked = check_spec(path.name, overrides_of(path))
    finally:
        os.chdir(before)
    assert checked.partition is not None, render_plain(checked.diagnostics)
    return dump(checked.partition) + "\n"


if __name__ == "__main__":
    for path in INVALID:
        path.with_suffix(".txt").write_text(findings_of(path), encoding="utf-8")
    for path in VALID:
        path.with_suffix(".txt").write_text(partition_of(path), encoding="utf-8")
