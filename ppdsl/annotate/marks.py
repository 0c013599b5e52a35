"""Stage marks: no-ops outside a recording, the borders of the pipeline inside one.

Two kinds of mark are written into ordinary model code (`stage`, `cutpoint`), two are laid on modules from outside
(`begin`, `place`). None of them changes what the model computes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import get_ident
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from ppdsl.diagnostics import Diagnostic, Label, MarkError
from ppdsl.source import Place, Span, caller_place

__all__ = [
    "Key",
    "MarkKind",
    "MarkListener",
    "ModuleMark",
    "begin",
    "cutpoint",
    "listen",
    "marks",
    "marks_of",
    "place",
    "stage",
    "unmark",
]

Key = int | str
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")
_ATTRIBUTE = "_ppdsl_marks"


class MarkListener(Protocol):
    """What a recording does when the model passes a mark."""

    def enter_stage(self, key: Key, place: Place) -> None:
        """A `with pp.stage(key)` block begins."""

    def exit_stage(self) -> None:
        """The innermost block ends, also when it ends with an exception."""

    def pass_cutpoint(self, name: str | None, optional: bool, place: Place) -> None:  # noqa: FBT001 - heard by position
        """Whatever runs from here on belongs to the next stage."""


# Keyed by thread: a recording must not hear the marks that another thread passes.
_listeners: dict[int, MarkListener] = {}


class listen:  # noqa: N801 - reads as a verb where it is used: `with listen(recorder)`
    """Send the marks that this thread passes to `listener`, within a `with` block."""

    def __init__(self, listener: MarkListener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        self._outer = _listeners.get(get_ident())
        _listeners[get_ident()] = self._listener

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            del _listeners[get_ident()]
        else:
            _listeners[get_ident()] = self._outer


class stage:  # noqa: N801 - used as a context manager and a decorator, like contextlib.suppress
    """Mark everything that runs inside as part of one stage.

    A context manager, and a decorator for functions and methods. Blocks nest: the innermost wins, and the outer one is
    restored at the end, also after an exception. The same key met again is the same stage. Outside a recording it does
    nothing.

    Args:
        key: Number or name of the stage.

    Raises:
        MarkError: `key` is neither an int nor a str.

    >>> with stage(0):
    ...     hidden = 1 + 1
    >>> @stage("head")
    ... def head(x):
    ...     return 2 * x
    >>> head(hidden)
    4
    """

    __slots__ = ("_code", "_heard", "_offset", "key")

    def __init__(self, key: Key) -> None:
        frame = sys._getframe(1)  # noqa: SLF001 - the interpreter has no public name for it
        self._code = frame.f_code
        self._offset = frame.f_lasti
        if type(key) is not int and type(key) is not str:
            key = _checked_key(key, Place(self._code, self._offset))
        self.key = key

    def __enter__(self) -> stage:
        if _listeners:
            listener = _listeners.get(get_ident())
            if listener is not None:
                listener.enter_stage(self.key, Place(self._code, self._offset))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _listeners:
            listener = _listeners.get(get_ident())
            if listener is not None:
                listener.exit_stage()

    def __call__(self, function: _F) -> _F:
        """Return `function`, which then runs inside this stage whenever it is called."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(_F, inside)

    def __repr__(self) -> str:
        return f"stage({self.key!r})"


def cutpoint(x: _T, name: str | None = None, *, optional: bool = False) -> _T:
    """Mark a border: whatever runs after this call belongs to the next stage.

    Args:
        x: Any value; it is returned unchanged, so that the mark can stand in an expression.
        name: A name a partition file can refer to.
        optional: The border is only a possible one: ignored unless something switches it on.

    Returns:
        `x` itself.

    >>> cutpoint([1, 2])
    [1, 2]
    """
    if _listeners:
        listener = _listeners.get(get_ident())
        if listener is not None:
            listener.pass_cutpoint(name, optional, caller_place())
    return x


class MarkKind(StrEnum):
    """What a mark laid on a module means."""

    BEGIN = "begin"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class ModuleMark:
    """A mark on a module, laid from outside.

    Attributes:
        kind: `begin`: from this module's call on; `place`: exactly this module's call.
        key: The stage.
        call: Which call of the module it means, counted from 0; None for each call.
        span: Where the mark was laid.
        module: Dotted name of the module; filled in by `marks`.
    """

    kind: MarkKind
    key: Key
    call: int | None
    span: Span
    module: str = ""

    def __str__(self) -> str:
        call = "" if self.call is None else f", call={self.call}"
        return f"{self.kind.value}({self.key!r}{call})"


def begin(module: Any, key: Key, *, call: int | None = None) -> None:
    """Start stage `key` when `module` is called: it and all that runs after it.

    Args:
        module: A `torch.nn.Module`; its source and its `forward` stay untouched.
        key: Number or name of the stage.
        call: Only the call with this number, from 0, for a module that is called several times.

    Raises:
        MarkError: `module` is no module, or `key` is neither an int nor a str.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> begin(net[1], 1)
    >>> [str(mark) for mark in marks(net)], marks(net)[0].module
    (['begin(1)'], '1')
    >>> unmark(net)
    """
    _lay(module, MarkKind.BEGIN, key, call, caller_place())


def place(module: Any, key: Key, *, call: int | None = None) -> None:
    """Put exactly this module's call into stage `key`; what runs afterwards is not affected.

    Args:
        module: A `torch.nn.Module`; its source and its `forward` stay untouched.
        key: Number or name of the stage.
        call: Only the call with this number, from 0, for a module that is called several times.

    Raises:
        MarkError: `module` is no module, or `key` is neither an int nor a str.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> place(net[0], "first")
    >>> net
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True, pp.place('first'))
      (1): ReLU()
    )
    >>> unmark(net)
    """
    _lay(module, MarkKind.PLACE, key, call, caller_place())


def marks(model: Any) -> tuple[ModuleMark, ...]:
    """Return the marks laid on `model` and its submodules, in the order of their names."""
    return tuple(
        replace(mark, module=name)
        for name, module in model.named_modules()
        for mark in module.__dict__.get(_ATTRIBUTE, ())
    )


def unmark(model: Any) -> None:
    """Remove all marks laid on `model` and its submodules."""
    for module in model.modules():
        if module.__dict__.pop(_ATTRIBUTE, None) is not None:
            module.__dict__.pop("extra_repr", None)


def marks_of(module: Any) -> tuple[ModuleMark, ...]:
    """Return the marks laid on this very module."""
    return cast("tuple[ModuleMark, ...]", module.__dict__.get(_ATTRIBUTE, ()))


def _lay(module: Any, kind: MarkKind, key: Key, call: int | None, at: Place) -> None:
    if not hasattr(module, "named_modules"):
        raise MarkError(
            Diagnostic(
                "no-module",
                f"A {kind.value} mark is laid on a torch.nn.Module, not on a {type(module).__name__}.",
                (Label(at.span),),
                "inside forward, write `with pp.stage(key):`",
            )
        )
    mark = ModuleMark(kind, _checked_key(key, at), call, at.span)
    others = tuple(old for old in marks_of(module) if old.call != call)
    # Straight into __dict__: a mark is not part of the model's state and must not run its __setattr__.
    module.__dict__[_ATTRIBUTE] = (*others, mark)
    module.__dict__["extra_repr"] = functools.partial(_extra_repr, module)


def _extra_repr(module: Any) -> str:
    own = type(module).extra_repr(module)
    laid = ", ".join(f"pp.{mark}" for mark in marks_of(module))
    return f"{own}, {laid}" if own else laid


def _checked_key(key: object, at: Place) -> Key:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int(key)
    raise MarkError(
        Diagnostic(
            "bad-key",
            f"A stage is marked with an int or a str, not with {key!r}.",
            (Label(at.span),),
            "for a computed number write `int(...)` around it",
        )
    )
