"""Reading a spec: from a path or a text to a checked `Partition`.

    load_spec("llama.ppspec", {"ranks": 8})

raises `SpecError` with all findings, or returns the partition. `check_spec` gives the findings beside it, warnings too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from warnings import warn

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, SpecError, render_plain
from ppdsl.spec.check import Checked, check
from ppdsl.spec.context import Context
from ppdsl.spec.include import gather
from ppdsl.spec.parse import Parsed, parse
from ppdsl.spec.partition import Partition
from ppdsl.spec.scan import MAX_BYTES

__all__ = ["check_spec", "check_text", "load_spec", "load_spec_text", "read_spec"]

_NONE: Mapping[str, int] = MappingProxyType({})


def load_spec(path: str | os.PathLike[str], overrides: Mapping[str, int] = _NONE) -> Partition:
    """Return the partition that a file describes.

    Args:
        path: The file.
        overrides: Values of its parameters, by name.

    Raises:
        SpecError: It cannot be read, or is wrong; carries all findings.
    """
    return _partition(check_spec(path, overrides))


def load_spec_text(
    text: str | bytes, file: str = "<spec>", overrides: Mapping[str, int] = _NONE, *, folder: Path | None = None
) -> Partition:
    """Return the partition that a text describes.

    Args:
        text: What a `.ppspec` file would hold.
        file: Its name, for findings.
        overrides: Values of its parameters, by name.
        folder: Where files that it names lie; None: it can name none.

    Raises:
        SpecError: It is wrong; carries all findings.

    >>> load_spec_text("param n = 2 pipeline net { split h[*] into n by params as b[i] @ i }").order
    ('b[0]', 'b[1]')
    """
    return _partition(check_text(text, file, overrides, folder=folder))


def check_spec(path: str | os.PathLike[str], overrides: Mapping[str, int] = _NONE) -> Checked:
    """Return what a file describes, and all findings.

    Raises:
        SpecError: The file cannot be read.
    """
    place = Path(path)
    return _checked(parse(read_spec(place), str(path)), str(path), place, place.parent, overrides)


def check_text(
    text: str | bytes, file: str = "<spec>", overrides: Mapping[str, int] = _NONE, *, folder: Path | None = None
) -> Checked:
    """Return what a text describes, and all findings; arguments as for `load_spec_text`."""
    return _checked(parse(text, file), file, None, folder, overrides)


def read_spec(path: Path) -> bytes:
    """Return the bytes of a file; of one that is too long only so many that it is seen to be.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"{path} cannot be read: {reason}."
        raise SpecError(Diagnostic("unreadable-spec", message, help="give the path of a .ppspec file")) from None


def _checked(
    parsed: Parsed, file: str, path: Path | None, folder: Path | None, overrides: Mapping[str, int]
) -> Checked:
    context = Context(folder)
    gathered = gather(parsed, file, path, context)
    return check(gathered, overrides, context)


def _partition(checked: Checked) -> Partition:
    errors = [found for found in checked.diagnostics if found.severity is Severity.ERROR]
    if checked.partition is None or errors:
        raise SpecError(*checked.diagnostics)
    if checked.diagnostics:
        warn(PpdslWarning(render_plain(checked.diagnostics)), stacklevel=3)
    return checked.partition
