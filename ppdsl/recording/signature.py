"""How a model was called: the arguments by name, their structure, and the tensors among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording.structure import Atom, Branch, Hole, Path, Template, Unpacked, fill, same_shape_of, unpack

__all__ = ["CallSignature", "check_loss_call"]


@dataclass(frozen=True)
class CallSignature:
    """The recorded call.

    Attributes:
        tensors: Example tensors, in order.
        names: Their paths, as a user writes them (`batch['mask']`, `targets[0]`).
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    _model: str
    _parameters: inspect.Signature | None
    _arguments: Unpacked

    @classmethod
    def of(
        cls, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]
    ) -> CallSignature:
        """Return the signature of `model(*args, **kwargs)` with `targets` for the loss."""
        try:
            parameters = inspect.signature(model.forward)
        except (TypeError, ValueError):
            parameters = None
        named = _bind(type(model).__name__, parameters, args, kwargs)
        parts = unpack((named, tuple(targets)))
        return cls(parts.tensors, tuple(map(_name, parts.paths)), type(model).__name__, parameters, parts)

    def call(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """Return (args, kwargs, targets) with these tensors in place of the recorded ones."""
        named, targets = fill(self._arguments.template, tensors)
        if self._parameters is None:
            return named["args"], named["kwargs"], targets
        bound = inspect.BoundArguments(self._parameters, named)
        return bound.args, bound.kwargs, targets

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of another call, in the recorded order.

        Raises:
            CallError: It does not have the recorded arguments, structure and constants.
        """
        named = _bind(self._model, self._parameters, args, kwargs)
        recorded = self._arguments.template
        parts = unpack((named, tuple(targets)))
        if not same_shape_of(parts.template, recorded):
            raise CallError(_apart(recorded, parts.template, ()) or _other_structure("the call"))
        return parts.tensors


def check_loss_call(loss: Callable[..., Any], targets: tuple[Any, ...]) -> None:
    """Check that `loss` takes the output and these targets.

    Raises:
        CallError: It needs more arguments, or takes fewer.
    """
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):
        return
    try:
        parameters.bind(None, *targets)
    except TypeError as error:
        given = {0: "no targets", 1: "one target"}.get(len(targets), f"{len(targets)} targets")
        raise CallError(
            Diagnostic(
                "wrong-targets",
                f"The loss is called with the output and {given}, which does not fit it: {error}.",
                (),
                f"pass targets=...: one tensor, or a tuple for several; the loss takes {parameters}",
            )
        ) from None


def _bind(
    model: str, parameters: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    if parameters is None:
        return {"args": args, "kwargs": kwargs}
    try:
        return _without_defaults(parameters, dict(parameters.bind(*args, **kwargs).arguments))
    except TypeError as error:
        raise CallError(
            Diagnostic(
                "wrong-arguments",
                f"The call does not fit forward of {model}: {error}.",
                (),
                f"forward takes {parameters}",
            )
        ) from None


def _without_defaults(parameters: inspect.Signature, named: dict[str, Any]) -> dict[str, Any]:
    """Leave out plain arguments that are what the default says anyway: a call means the same with them and without."""
    kinds = {parameter.kind for parameter in parameters.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return named  # there, an argument is known by its position
    return {name: value for name, value in named.items() if not _is_default(value, parameters.parameters[name].default)}


def _is_default(value: Any, default: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and type(value) is type(default) and value == default


def _name(path: Path) -> str:
    """Return how a user writes the way to an argument."""
    (_, which), *rest = path
    if which == 1:
        text = "targets"
    else:
        (_, first), *rest = rest
        text = str(first)
    for kind, key in rest:
        text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text


def _apart(recorded: Template, given: Template, path: Path) -> Diagnostic | None:
    """Return a finding about the first argument that differs."""
    name = _name(path) if len(path) > 1 or (path and path[0][1] == 1) else "the call"
    if isinstance(recorded, Branch) and isinstance(given, Branch) and recorded.type is given.type:
        if recorded.keys != given.keys and recorded.kind == "mapping":
            return _other_keys(name, recorded.keys, given.keys)
        if len(recorded.children) != len(given.children):
            return Diagnostic(
                "wrong-structure",
                f"{_argument(name)} has {len(given.children)} items, but was recorded with {len(recorded.children)}.",
                (),
                "pass the recorded structure, or build another pipeline for this one",
            )
        steps = (
            recorded.keys
            if recorded.kind in ("mapping", "output", "dataclass", "object")
            else range(len(recorded.children))
        )
        kind = "attr" if recorded.kind in ("dataclass", "object") else "item"
        for step, left, right in zip(steps, recorded.children, given.children, strict=False):
            finding = _apart(left, right, (*path, (kind, step)))
            if finding is not None:
                return finding
        return None
    if same_shape_of(recorded, given):
        return None
    if isinstance(recorded, Atom) and isinstance(given, Atom):
        return Diagnostic(
            "other-constant",
            f"{_argument(name)} is {given.value!r}, but the plan was recorded with {recorded.value!r}.",
            (),
            "build another pipeline for this value: it may decide what the model does",
        )
    if isinstance(recorded, Hole) and isinstance(given, Hole):
        return None
    if isinstance(recorded, Hole) and isinstance(given, Branch) and given.kind == "sequence":
        return Diagnostic(
            "wrong-structure",
            f"{_argument(name)} is a {given.type.__name__} of {len(given.children)}, but was recorded as one tensor.",
            (),
            "give the whole batch as one tensor: the pipeline cuts it into micro-batches by itself",
        )
    return _other_structure(name)


def _other_keys(name: str, recorded: tuple[Any, ...], given: tuple[Any, ...]) -> Diagnostic:
    missing = [str(key) for key in recorded if key not in given]
    unknown = [str(key) for key in given if key not in recorded]
    what = []
    if missing:
        what.append(f"lacks {', '.join(f'`{key}`' for key in missing)}")
    if unknown:
        what.append(f"has {', '.join(f'`{key}`' for key in unknown)}, which the plan was recorded without")
    return Diagnostic(
        "wrong-arguments",
        f"{_argument(name)} {' and '.join(what) or 'has its keys in another order'}.",
        (),
        "pass the arguments that the pipeline was built with",
    )


def _other_structure(name: str) -> Diagnostic:
    return Diagnostic(
        "wrong-structure",
        f"{_argument(name)} has another structure than in the recording.",
        (),
        "pass the recorded structure, or build another pipeline for this one",
    )


def _argument(name: str) -> str:
    return "The call" if name == "the call" else f"Argument `{name}`"
