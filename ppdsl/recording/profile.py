"""Measure the modules of a model one by one, so that a model larger than memory can be measured.

Each module is built alone on the device, with random parameters where the model has none yet, runs on random inputs of
the recorded sizes, and is freed before the next one. Modules of the same kind and the same sizes (the layers of a
transformer) are measured once. What holds most of the model and calls other modules is left out: it may not fit into
memory, and its time is that of its parts.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic, RecordingError
from ppdsl.recording import compat
from ppdsl.recording.admission import check_inputs, check_model
from ppdsl.recording.fakes import real_like
from ppdsl.recording.findings import labels_of
from ppdsl.recording.outline import module_frames
from ppdsl.recording.replay import slice_of
from ppdsl.recording.session import record_tape
from ppdsl.recording.signature import CallSignature
from ppdsl.recording.structure import Atom, Branch, Template, fill
from ppdsl.recording.tape import Frame, Tape, Value, ValueKind
from ppdsl.spec.costfile import ModuleCost, costs_of_files, seconds_of
from ppdsl.spec.partition import Balance, Partition

__all__ = ["measured_costs", "profile_call"]

_REPEATS = 5


def profile_call(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    device: torch.device | str | None = None,
    repeats: int = _REPEATS,
) -> tuple[ModuleCost, ...]:
    """Return the seconds of each called module of a model but the model itself, in the order of their first calls.

    Args:
        model: The model; its parameters may be on `meta`.
        args: Positional example inputs, one micro-batch.
        kwargs: Named example inputs.
        loss: As for `record_call`; it is not measured.
        targets: As for `record_call`.
        device: Where to measure; None: CUDA when there is one, else the CPU.
        repeats: How often each module runs; the median counts.

    Raises:
        RecordingError: A module cannot run alone.
    """
    check_model(model)
    signature = CallSignature.of(model, args, kwargs or {}, targets)
    check_inputs(signature.names, signature.tensors)
    tape = record_tape(model, signature, loss)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    measured: dict[Any, tuple[float, float]] = {}
    costs: dict[str, list[float]] = {}
    whole = _bytes_in(model)
    for frame in module_frames(tape):
        if isinstance(frame.module, torch.jit.ScriptModule) or _is_bulk(frame, whole):
            continue
        alike = _kind_of(frame)
        if alike not in measured:
            measured[alike] = _Alone(frame, tape, signature.tensors, place).seconds(repeats)
        entry = costs.setdefault(frame.name, [0.0, 0.0])
        entry[0] += measured[alike][0]
        entry[1] += measured[alike][1]
    return tuple(ModuleCost(name, forward, backward) for name, (forward, backward) in costs.items())


def measured_costs(
    partition: Partition | None,
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, float] | None:
    """Return the seconds that a spec needs, from its cost files and measured here; None when it balances by neither.

    Args:
        partition: The spec, or None.
        model: As for `profile_call`.
        args: As for `profile_call`.
        kwargs: As for `profile_call`.
        device: As for `profile_call`.

    Raises:
        RecordingError: A module cannot run alone.
        SpecError: A cost file is wrong.
    """
    if partition is None:
        return None
    costs = costs_of_files(partition)
    if any(split.balance is Balance.TIME for split in partition.splits):
        costs = {**(costs or {}), **seconds_of(profile_call(model, args, kwargs, device=device))}
    return costs


def _is_bulk(frame: Frame, whole: int) -> bool:
    if not frame.name:
        return True
    return 3 * _bytes_in(frame.module) > whole and any(isinstance(part, Frame) for part in frame.parts)


def _bytes_in(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _kind_of(frame: Frame) -> Any:
    """Equal for two calls that take the same time: same classes, settings, sizes and switches."""
    module = frame.module
    return (
        tuple((name, type(child), _settings(child)) for name, child in module.named_modules()),
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()),
        tuple(value.meta for value in frame.inputs),
        frame.ambient,
        repr(frame.result.paths) if frame.result is not None else "",
    )


def _settings(module: torch.nn.Module) -> tuple[Any, ...]:
    plain = (bool, int, float, str)
    return tuple(
        sorted((name, value) for name, value in vars(module).items() if type(value) in plain and name != "layer_idx")
    )


class _Alone:
    """One module call, taken out of its model."""

    def __init__(self, frame: Frame, tape: Tape, examples: Sequence[torch.Tensor], device: torch.device) -> None:
        self._frame = frame
        self._tape = tape
        self._examples = examples
        self._device = device

    def seconds(self, repeats: int) -> tuple[float, float]:
        """Return the seconds of one forward and of one backward.

        Raises:
            RecordingError: The module cannot run alone.
        """
        try:
            module = self._copy()
            tensors = [self._real(value) for value in self._frame.inputs]
            times = [self._once(module, tensors) for _ in range(repeats + 1)][1:]  # the first one warms up
        except Exception as error:
            text = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            message = f"Module `{self._frame.name}` cannot be measured alone: {text}."
            place = labels_of(self._frame.place)
            raise RecordingError(
                Diagnostic("not-measured", message, place, "write its times into a cost file, and use by file(...)")
            ) from error
        finally:
            gc.collect(0)
        return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)

    def _copy(self) -> torch.nn.Module:
        """A copy of the module with parameters of its own on the device; what has no numbers gets random ones."""
        module: torch.nn.Module = self._frame.module
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            with torch.no_grad():
                new = torch.empty_like(parameter, device=self._device)
                if new.is_floating_point():
                    new.normal_(0.0, 0.02)
                else:
                    new.zero_()
            memo[id(parameter)] = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            ready = buffer.detach().to(self._device, copy=True) if not buffer.is_meta else None
            memo[id(buffer)] = torch.zeros_like(buffer, device=self._device) if ready is None else ready
        return copy.deepcopy(module, memo)

    def _real(self, value: Value) -> torch.Tensor:
        if value.kind is ValueKind.INPUT and value.before is None:
            example = self._examples[value.index]
            if not example.is_meta and not compat.is_fake(example):
                return example.detach().to(self._device)
        elif value.known:
            try:
                return slice_of(self._tape.records, (value,)).run(self._examples)[0].to(self._device, copy=True)
            except LookupError:
                pass
        meta = value.meta
        shape = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
        return real_like(shape, 1).to(self._device)

    def _once(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
        wanted = [value.meta.requires_grad for value in self._frame.inputs]
        leaves = [t.detach().clone().requires_grad_(grad) for t, grad in zip(tensors, wanted, strict=True)]
        given = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]  # no leaves: it may write in place
        args, kwargs = fill(_fresh(self._frame.arguments.template), given)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._frame.ambient.grad))
            for kind, dtype in self._frame.ambient.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            begun = self._now()
            result = module(*args, **kwargs)
            between = self._now()
        ends = [tensor for tensor in _tensors_in(result) if tensor.requires_grad]
        if not ends:
            return between - begun, 0.0
        gradients = [torch.ones_like(tensor) for tensor in ends]
        middle = self._now()
        torch.autograd.backward(ends, gradients)
        return between - begun, self._now() - middle

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _fresh(template: Template) -> Template:
    """A template with copies of its objects: a cache among the arguments must not grow with each repetition."""
    if isinstance(template, Branch):
        return replace(template, children=tuple(map(_fresh, template.children)))
    if isinstance(template, Atom) and not isinstance(template.value, torch.nn.Module):
        try:
            return Atom(copy.deepcopy(template.value))
        except Exception:  # what cannot be copied is used again
            return template
    return template


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors_in(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors_in(value)
