"""Files that a spec names: only inside its own folder, after links are followed."""

from __future__ import annotations

from pathlib import Path

from ppdsl.source import Span
from ppdsl.spec.context import Context

__all__ = ["file_inside", "resolved_inside"]


def resolved_inside(text: str, span: Span, folder: Path | None, context: Context) -> Path | None:
    """Return the place of a file that a spec names, or None after a finding.

    Args:
        text: As written.
        span: Where it is written.
        folder: Of the file that it is written in; None when that has none.
        context: Takes findings.
    """
    if folder is None:
        context.report("no-folder", f"The text has no folder to look for `{text}` in.", span, help="save it as a file")
        return None
    try:
        root = folder.resolve()
        path = (root / text).resolve()
        inside = path.is_relative_to(root) and not Path(text).is_absolute()
        there = inside and path.is_file()
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a name too long, links that go round
        inside, there, path = True, False, folder
    if not inside:
        message = f"`{text}` lies outside the folder of the spec."
        context.report("outside-folder", message, span, help="copy the file beside the spec")
        return None
    if not there:
        context.report("missing-file", f"There is no file `{text}`.", span, help="paths begin at the spec's folder")
        return None
    return path


def file_inside(text: str, span: Span, context: Context) -> str | None:
    """Return the path, from the main spec's folder on, of a file that a spec names; None after a finding."""
    folder = context.folder_of(span.file)
    path = resolved_inside(text, span, folder, context)
    if path is None or context.folder is None:
        return None
    return path.relative_to(context.folder.resolve()).as_posix()
