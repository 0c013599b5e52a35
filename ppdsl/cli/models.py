"""From `--model pkg.mod:make` to a model with one micro-batch of example inputs."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ppdsl.cli.output import WrongUseError
from ppdsl.diagnostics import Diagnostic

__all__ = ["ModelCall", "load_model"]

_FORM = "give module and function, as in --model my_package.nets:make or --model examples/02_unet.py:make"
_RETURNS = (
    "return (model, args), (model, args, kwargs), or a dict with 'model', 'args' and perhaps "
    "'kwargs', 'loss', 'targets'"
)
_KEYS = ("model", "args", "kwargs", "loss", "targets")


@dataclass(frozen=True)
class ModelCall:
    """A model and how it is called.

    Attributes:
        model: A torch module.
        args: Positional arguments of one micro-batch.
        kwargs: Keyword arguments of one micro-batch.
        loss: Called with the output and the targets, or None when the model returns its loss or none is wanted.
        targets: What the loss takes beside the output.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()


def load_model(target: str) -> ModelCall:
    """Import and call the function that `target` names.

    Args:
        target: `pkg.mod:make` or `path/file.py:make`; the working directory is searched first.

    Raises:
        WrongUseError: `target` names no function, or it returns something else.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise WrongUseError(_finding("bad-model", f"--model {target} does not name a function.", _FORM))
    make = _attribute(_load(place), place, name)
    return _to_call(make(), target)


def _load(place: str) -> ModuleType:
    if place.endswith(".py") or "/" in place:
        return _load_file(Path(place))
    if not all(part.isidentifier() for part in place.split(".")):
        raise WrongUseError(_finding("bad-model", f"{place!r} is neither a module nor a Python file.", _FORM))
    with _search_first(Path.cwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, but something it imports is not
            message = f"There is no module {error.name!r} here or among the installed packages."
            help_text = "run in the directory that holds it, or give its file: --model path/to/file.py:make"
            raise WrongUseError(_finding("unknown-module", message, help_text)) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        help_text = f"did you mean {path.parent / near[0]}?" if near else "give a Python file that exists"
        raise WrongUseError(_finding("no-such-file", f"There is no file {path}.", help_text))
    # Not the bare stem: a file `torch.py` or `02_unet.py` must not shadow a module.
    name = f"_ppdsl_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WrongUseError(_finding("bad-model", f"{path} is no Python file.", _FORM))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    with _search_first(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _search_first(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _attribute(module: ModuleType, place: str, name: str) -> Callable[[], Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]  # what it returns is checked by _to_call
    functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    near = difflib.get_close_matches(name, functions, n=1)
    help_text = f"did you mean {place}:{near[0]}?" if near else f"write a function {name}() there that gives the model"
    what = "no function" if found is None else f"something that is no function ({type(found).__name__}) as"
    raise WrongUseError(_finding("unknown-function", f"{place} has {what} {name!r}.", help_text))


def _to_call(made: Any, target: str) -> ModelCall:
    """Understand the three forms in which a model may be given.

    Raises:
        WrongUseError: It is none of them.
    """
    match made:
        case dict() if "model" in made:
            rest: dict[str, Any] = made
            unknown = sorted(set(map(str, rest)) - set(_KEYS))
            if unknown:
                raise WrongUseError(
                    _finding("bad-model", f"{target} returns a dict with the key {unknown[0]!r}.", _RETURNS)
                )
            call = ModelCall(
                model=rest["model"],
                args=_tuple(rest.get("args", ())),
                kwargs=rest.get("kwargs") or {},
                loss=rest.get("loss"),
                targets=_tuple(rest.get("targets", ())),
            )
        case (model, args):
            call = ModelCall(model, _tuple(args), {})
        case (model, args, kwargs):
            call = ModelCall(model, _tuple(args), kwargs)
        case _:
            raise WrongUseError(
                _finding("bad-model", f"{target} returns {_kind(made)}, not a model with its arguments.", _RETURNS)
            )
    if not callable(call.model) or not hasattr(call.model, "named_parameters"):
        raise WrongUseError(_finding("bad-model", f"{target} gives {_kind(call.model)} as the model.", _RETURNS))
    if not isinstance(call.kwargs, Mapping):
        raise WrongUseError(
            _finding("bad-model", f"{target} gives {_kind(call.kwargs)} as keyword arguments, not a dict.", _RETURNS)
        )
    return call


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _finding(code: str, message: str, help_text: str) -> Diagnostic:
    return Diagnostic(code, message, help=help_text)
