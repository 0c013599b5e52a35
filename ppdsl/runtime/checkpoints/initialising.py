"""Initial weights: every process draws all of them in one order and keeps its own, so they equal one device's.

    for each module, children first          as constructors run
        its tensors become scratch memory    on the CPU, also those of other ranks
        reset_parameters(), then init()      draws the same numbers on every rank
        other ranks' tensors become what they were

No process holds more than its own tensors and those of one module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.recording import compat
from ppdsl.runtime.checkpoints.subject import Slot, Subject

__all__ = ["Initialiser", "initialise"]

Initialiser = Callable[[torch.nn.Module], Any]
"""Fills a module's own parameters and buffers, not those of its children."""

_CPU = torch.device("cpu")


def initialise(
    subject: Subject, wanted: Collection[Slot], init: Initialiser | None, seed: int, *, only_empty: bool = False
) -> None:
    """Draw the values of all `wanted` tensors and fill this process's among them.

    The process's random numbers are left as they were.

    Args:
        subject: The model.
        wanted: The tensors to fill, the same on every rank; modules that hold none of them are left out.
        init: Called for each module after its own `reset_parameters`.
        seed: Of the random numbers.
        only_empty: Whether tensors that have values keep them.

    Raises:
        CallError: A tensor without values is left without, or an initialiser fails or reaches into other modules.
    """
    held: dict[int, list[Slot]] = {}
    for slot in subject.slots:
        for module, _ in slot.places:
            held.setdefault(id(module), []).append(slot)
    names = {id(module): name for name, module in subject.model.named_modules()}
    originals = {slot: slot.tensor for slot in subject.slots}
    drawn: dict[Slot, torch.Tensor] = {}
    filled: set[Slot] = set()
    chosen = frozenset(wanted)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)
            for module in _children_first(subject.model):
                # When weights are loaded, only the modules that hold what the weights lack.
                if len(chosen) < len(subject.slots) and chosen.isdisjoint(held.get(id(module), ())):
                    continue
                scope = _scope(module, held)
                starts = _borrow(scope, drawn)
                _run(module, init, names[id(module)])
                _give_back(scope, starts, drawn, originals, filled)
    except BaseException:
        for slot, tensor in originals.items():
            _restore(slot, tensor)
        raise
    for slot, tensor in originals.items():
        _restore(slot, tensor)
    mine = [slot for slot in subject.slots if slot in chosen and slot.mine]
    _check(mine, originals, filled)
    for slot in mine:
        if slot in filled and (slot.tensor.is_meta or not only_empty):
            _commit(slot, drawn[slot])


def _children_first(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    seen: set[int] = set()

    def visit(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child in module.children():
            yield from visit(child)
        yield module

    return visit(model)


def _reset_of(module: torch.nn.Module) -> Callable[[], Any] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _scope(module: torch.nn.Module, held: Mapping[int, list[Slot]]) -> list[Slot]:
    """Return what the initialisers of a module may write: its own tensors, and with a reset of its own its children's.

    `torch.nn.MultiheadAttention` sets the bias of its output projection, for example.
    """
    inside = module.modules() if _reset_of(module) is not None else (module,)
    return list(dict.fromkeys(slot for part in inside for slot in held.get(id(part), ())))


def _borrow(scope: Iterable[Slot], drawn: Mapping[Slot, torch.Tensor]) -> dict[Slot, tuple[torch.Tensor, int]]:
    """Put scratch memory into the model; return it with how often it was written."""
    starts = {}
    for slot in scope:
        scratch = drawn.get(slot)
        if scratch is None:
            held = slot.tensor.detach()
            if held.is_meta:
                scratch = torch.empty_like(held, device=_CPU)
                if scratch.is_floating_point() or scratch.is_complex():
                    scratch.fill_(float("nan"))
            else:
                scratch = held.to(_CPU, copy=True)
        slot.put(scratch)
        starts[slot] = (slot.tensor, compat.version_of(slot.tensor))
    return starts


def _run(module: torch.nn.Module, init: Initialiser | None, name: str) -> None:
    reset = _reset_of(module)
    try:
        with _NoForeignWrites():
            if reset is not None:
                reset()
            if init is not None:
                init(module)
    except CallError:
        raise
    except _ForeignWriteError as error:
        message = f"The initialiser of `{name or 'the model'}` writes to tensors that are not its own."
        advice = "fill each module's own parameters and buffers only; init= is called for every module"
        raise CallError(Diagnostic("foreign-write", message, help=advice)) from error
    except Exception as error:
        message = f"The initialiser of `{name or 'the model'}` failed: {type(error).__name__}: {error}"
        raise CallError(Diagnostic("initialiser-failed", message)) from error


def _give_back(
    scope: Iterable[Slot],
    starts: Mapping[Slot, tuple[torch.Tensor, int]],
    drawn: dict[Slot, torch.Tensor],
    originals: Mapping[Slot, torch.Tensor],
    filled: set[Slot],
) -> None:
    for slot in scope:
        start, version = starts[slot]
        now = next((t for m, a in slot.places if (t := getattr(m, a)) is not start), start)
        if now is not start or _written(start, version):
            filled.add(slot)
        if slot.mine:
            drawn[slot] = now.detach()
            _restore(slot, now)
        else:
            _restore(slot, originals[slot])


def _written(tensor: torch.Tensor, version: int) -> bool:
    if tensor.numel() == 0 or compat.version_of(tensor) != version:
        return True
    # Written through `.data`, which counts no versions.
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return not bool(tensor.isnan().all())


def _restore(slot: Slot, tensor: torch.Tensor) -> None:
    for module, attribute in slot.places:
        setattr(module, attribute, tensor)


def _check(mine: Iterable[Slot], originals: Mapping[Slot, torch.Tensor], filled: Collection[Slot]) -> None:
    left = [slot for slot in mine if originals[slot].is_meta and slot not in filled]
    parameters = [slot for slot in left if slot.parameter]
    buffers = [slot for slot in left if not slot.parameter]
    findings = []
    if parameters:
        message = f"Nothing gives values to {_listed(parameters)}: {_kinds(parameters)} without reset_parameters()."
        advice = "give init=, a function that fills a module's own parameters, or weights="
        findings.append(Diagnostic("no-initialiser", message, help=advice))
    if buffers:
        message = f"Nothing gives values to {_listed(buffers)}, which no state dictionary and no initialiser holds."
        advice = (
            "let reset_parameters() of its module compute it, or init=, a function of a module; or build the model "
            "with real buffers and only its parameters on meta"
        )
        findings.append(Diagnostic("no-buffer-values", message, help=advice))
    if findings:
        raise CallError(*findings)


def _listed(slots: Iterable[Slot]) -> str:
    names = [f"{'parameter' if slot.parameter else 'buffer'} `{slot.name}`" for slot in slots]
    return ", ".join(names)


def _kinds(slots: Iterable[Slot]) -> str:
    kinds = dict.fromkeys(type(slot.places[0][0]).__name__ for slot in slots)
    return f"{', '.join(kinds)} {'is a class' if len(kinds) == 1 else 'are classes'}"


def _commit(slot: Slot, drawn: torch.Tensor) -> None:
    held = slot.tensor
    if held.is_meta:
        slot.put(drawn.to(slot.goal))
    else:
        with torch.no_grad():
            held.copy_(drawn)


class _ForeignWriteError(Exception):
    """A tensor without memory was written."""


class _NoForeignWrites(TorchFunctionMode):
    """Refuses to write tensors on meta: they are other modules', and would draw numbers on some ranks only."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in (*args, *kwargs.values())):
            raise _ForeignWriteError
        return func(*args, **kwargs)
