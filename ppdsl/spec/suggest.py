"""Spelling suggestions: the name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(written: str, known: Iterable[str]) -> str | None:
    """Return the known name that `written` is most like, or None when none is like it.

    Of dotted names those with the same end are looked at first: a wrong or missing prefix is the most frequent slip.

    >>> nearest("transformer.hh", ["transformer.h", "lm_head"]), nearest("lm_hed", ["transformer.h", "lm_head"])
    ('transformer.h', 'lm_head')
    >>> nearest("layers", ["model.layers", "model.norm"])
    'model.layers'
    """
    names = list(dict.fromkeys(known))
    same_end = [name for name in names if written and name.endswith(f".{written}")]
    if same_end:
        return min(same_end, key=len)
    lowered = {name.casefold(): name for name in reversed(names)}
    if written.casefold() in lowered:
        return lowered[written.casefold()]
    # A model has thousands of modules and the slow comparison is quadratic: names of very other lengths go first.
    near = [name for name in names if abs(len(name) - len(written)) <= max(4, len(written) // 2)]
    found = difflib.get_close_matches(written, near[:5000], n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(written: str, known: Iterable[str]) -> str | None:
    """Return the help line for a name that is not known, or None when no name is like it.

    >>> did_you_mean("lm_hed", ["transformer.h", "lm_head"])
    'did you mean `lm_head`?'
    """
    found = nearest(written, known)
    return None if found is None else f"did you mean `{found}`?"
