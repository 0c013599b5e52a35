"""Where the grammar of the language lies: inside an installed package, or beside the package in a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["grammar_text"]

_NAME = "ppspec.lark"


def grammar_text() -> str:
    """Return the text of `ppspec.lark`.

    A wheel holds it in `ppdsl/grammar`. A checkout, and an editable install, which points to one, keep it in the folder
    `grammar` beside the package.

    Raises:
        FileNotFoundError: It lies in neither place: the installation is damaged.
    """
    installed = files("ppdsl") / "grammar" / _NAME
    if installed.is_file():
        return installed.read_text(encoding="utf-8")
    beside = Path(__file__).resolve().parent.parent.parent / "grammar" / _NAME
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    raise FileNotFoundError(f"{_NAME} lies neither in {installed} nor in {beside.parent}: install ppdsl again")
