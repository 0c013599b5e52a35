"""Python functions that the recorder must see as one call, replaced for the recording thread only.

A function object's code is swapped rather than the name it is stored under: aliases such as
`swiglu = SwiGLU.apply` or `from torch.utils.checkpoint import checkpoint` are then seen as well.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, Protocol

import torch

from ppdsl.recording import compat

__all__ = ["Interceptor", "intercepting"]


class Interceptor(Protocol):
    """The recorder, as the patches see it."""

    def on_module_call(
        self, original: Any, owner: type, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`module(*args, **kwargs)` reached the `__call__` that class `owner` defines."""

    def on_attribute(self, module: Any, name: str, value: Any, before: Any) -> None:
        """`module.name = value` was executed; it was `before`."""

    def on_read(self, module: Any, name: str) -> None:
        """`module.name` was read, and is a number, a flag or a text."""

    def on_function(self, name: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of the functions of `compat.functions_to_intercept` was called."""


_active: dict[int, Interceptor] = {}
_SETTINGS = (bool, int, float, str)


@contextmanager
def intercepting(interceptor: Interceptor, modules: list[torch.nn.Module]) -> Iterator[None]:
    """Route module calls, attribute writes and special functions of this thread to `interceptor`."""
    with ExitStack() as stack:
        for owner in _classes_with_call(modules):
            stack.enter_context(_patched_attribute(owner, "__call__", _routed_call(owner)))
        for owner in _classes_defining(modules, "__setattr__"):
            stack.enter_context(_patched_attribute(owner, "__setattr__", _routed_setattr(owner)))
        stack.enter_context(_routed_reads())
        for name, function in compat.functions_to_intercept():
            stack.enter_context(_swapped_code(name, function))
        outer = _active.get(get_ident())
        _active[get_ident()] = interceptor
        try:
            yield
        finally:
            if outer is None:
                del _active[get_ident()]
            else:
                _active[get_ident()] = outer


def _classes_with_call(modules: list[torch.nn.Module]) -> list[type]:
    return _classes_defining(modules, "__call__")


def _classes_defining(modules: list[torch.nn.Module], name: str) -> list[type]:
    found: dict[type, None] = {torch.nn.Module: None}
    for kind in {type(module) for module in modules}:
        for owner in kind.__mro__:
            # A ScriptModule is one opaque call: its methods are not Python.
            if name in owner.__dict__ and issubclass(owner, torch.nn.Module) and "torch.jit" not in owner.__module__:
                found[owner] = None
    return list(found)


def _routed_call(owner: type) -> Callable[..., Any]:
    original = owner.__dict__["__call__"]

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        interceptor = _active.get(get_ident())
        if interceptor is None:
            return original(module, *args, **kwargs)
        return interceptor.on_module_call(original, owner, module, args, kwargs)

    return __call__


def _routed_setattr(owner: type) -> Callable[..., Any]:
    original = owner.__dict__["__setattr__"]

    def __setattr__(module: Any, name: str, value: Any) -> None:  # noqa: N807
        interceptor = _active.get(get_ident())
        before = None if interceptor is None else module.__dict__.get(name)
        original(module, name, value)
        if interceptor is not None:
            interceptor.on_attribute(module, name, value, before)

    return __setattr__


@contextmanager
def _routed_reads() -> Iterator[None]:
    """Hear reads of plain values; `torch.nn.Module` has no `__getattribute__` of its own."""

    def __getattribute__(module: Any, name: str) -> Any:  # noqa: N807
        value = object.__getattribute__(module, name)
        if type(value) in _SETTINGS and name[0] != "_":
            interceptor = _active.get(get_ident())
            if interceptor is not None and name in object.__getattribute__(module, "__dict__"):
                interceptor.on_read(module, name)
        return value

    torch.nn.Module.__getattribute__ = __getattribute__  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.nn.Module.__getattribute__


@contextmanager
def _patched_attribute(owner: type, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _swapped_code(name: str, function: types.FunctionType) -> Iterator[None]:
    """Make every call of `function`, under whatever name, go through `_route`."""
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    code, defaults, kwdefaults = function.__code__, function.__defaults__, function.__kwdefaults__
    _originals[name] = original
    function.__code__ = _routing_code(name, code.co_freevars)
    function.__defaults__ = function.__kwdefaults__ = None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults
        del _originals[name]


_originals: dict[str, Any] = {}


def _route(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    original = _originals[name]
    interceptor = _active.get(get_ident())
    if interceptor is None:
        return original(*args, **kwargs)
    return interceptor.on_function(name, original, args, kwargs)


def _routing_code(name: str, free: tuple[str, ...]) -> types.CodeType:
    """Return code that calls `_route`, with as many free variables as the code it replaces."""
    cells = "".join(f"    {variable} = None\n" for variable in free)
    uses = f"        ({', '.join(free)},)\n" if free else ""
    source = (
        f"def outer():\n{cells}"
        f"    def routed(*args, **kwargs):\n{uses}"
        f"        from ppdsl.recording.patches import _route\n"
        f"        return _route({name!r}, args, kwargs)\n"
        f"    return routed\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    code: types.CodeType = namespace["outer"]().__code__
    if code.co_freevars != tuple(sorted(free)) and len(code.co_freevars) != len(free):
        raise RuntimeError(f"cannot route calls of {name}: free variables {code.co_freevars} for {free}")
    return code
