"""Code that fakes cannot run: one module, or one call, tried on small random tensors to learn what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ppdsl.diagnostics import Diagnostic
from ppdsl.recording import compat
from ppdsl.recording.fakes import real_like
from ppdsl.recording.findings import DataDependence, data_dependence, is_inner, labels_of, unseen
from ppdsl.recording.naming import writes_in_place
from ppdsl.recording.replay import slice_of
from ppdsl.recording.structure import Unpacked, fill, same_shape_of, unpack
from ppdsl.recording.tape import Frame, Record, RecordKind, Value, ValueKind, meta_of
from ppdsl.recording.unknown import Unknown, hide_numbers, numbers_in
from ppdsl.recording.upkeep import Picture, picture_of
from ppdsl.source import Place

__all__ = ["place_of", "probe_call", "probe_frame"]

# Functions whose kernels keep something of a size that depends on values, but whose result has a fixed shape.
_FIXED_RESULT = frozenset({"ctc_loss"})


def probe_call(
    recorder: Any,
    func: Any,
    name: str,
    parts: Unpacked,
    values: tuple[Value, ...],
    tensors: list[torch.Tensor],
    error: Exception,
) -> Any:
    """Return fakes like the results of `func`, which has no fake kernel, or raise what is wrong with the call."""
    if isinstance(error, compat.SHAPE_ERRORS) and name not in _FIXED_RESULT:
        raise data_dependence(name, recorder.place_now(), recorder.frames.current) from error
    if writes_in_place(name):
        raise error
    tries = []
    for seed in (1, 2):
        reals = [_real_of(recorder, value, tensor, seed) for value, tensor in zip(values, tensors, strict=True)]
        args, kwargs = fill(parts.template, reals)
        try:
            with recorder.quiet(), compat.without_dispatch_modes(), torch.random.fork_rng(devices=[]):
                tries.append(unpack(func(*args, **kwargs)))
        except Exception:
            raise error from None  # the call is wrong on real tensors too: the user's own error says it best
    if [meta_of(t) for t in tries[0].tensors] != [meta_of(t) for t in tries[1].tensors] or not tries[0].tensors:
        raise data_dependence(name, recorder.place_now(), recorder.frames.current) from error
    return fill(tries[0].template, [_fake_result(recorder, tensor) for tensor in tries[0].tensors])


def probe_frame(
    recorder: Any, frame: Frame, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Any:
    """Run one module alone on real tensors; it is then one call that cannot be taken apart.

    Raises:
        DataDependence: The module cannot be tried: it holds a stage border, or its results have no fixed shape.
    """
    if getattr(error, "tried_on_real_tensors", False):
        raise error
    trouble = _trouble(recorder, frame, error)
    if frame.marked or frame.module is None:
        raise trouble from (None if trouble is error else error)
    remember = _forget(recorder, frame)
    tensors = [recorder.ledger.stand_in(tensor) for tensor in frame.arguments.tensors]
    results: list[Unpacked] = []
    for seed in (1, 2):
        with compat.without_dispatch_modes():
            reals = [_real_of(recorder, value, fake, seed) for value, fake in zip(frame.inputs, tensors, strict=True)]
            versions = [compat.version_of(real) for real in reals]
        real_args, real_kwargs = fill(frame.arguments.template, reals)
        with recorder.quiet() as spied, _real_state(recorder, frame.module, seed) as state:
            try:
                with compat.without_dispatch_modes(torch_functions=True):
                    result = function(*real_args, **real_kwargs)
            except (DataDependence, *compat.DATA_ERRORS):
                raise trouble from (None if trouble is error else error)
            except Exception as wrong:
                # It fails on real tensors too: the user's own error, which no frame around needs to try again.
                own = error
                if isinstance(error, DataDependence) or trouble is not error:  # fakes were what failed, not the code
                    own = wrong
                    recorder.refusals.append(trouble)  # code that catches it follows the numbers
                else:
                    remember()  # code that catches it goes on after what was done so far
                own.tried_on_real_tensors = True  # type: ignore[attr-defined]
                raise own from None
            if any(compat.is_fake(tensor) for tensor in spied.values()):
                # It reaches a tensor of this forward pass by a way of its own.
                raise trouble from (None if trouble is error else error)
            with compat.without_dispatch_modes():
                results.append(unpack(result))
                used, written = state.used(spied), state.written()
        changed = [i for i, real in enumerate(reals) if compat.version_of(real) != versions[i]]
    first, second = results
    if [meta_of(t) for t in first.tensors] != [meta_of(t) for t in second.tensors]:
        raise DataDependence(
            Diagnostic(
                "dynamic-shape",
                f"Module `{frame.name}` returns tensors whose shapes depend on the numbers in its inputs.",
                labels_of(frame.place),
                "pad its results to a fixed size, or keep the modules that use them inside one module of one stage",
            )
        ) from error
    told = (numbers_in(first.template) | numbers_in(second.template)) - numbers_in(frame.arguments.template)
    if told or not same_shape_of(first.template, second.template):
        raise DataDependence(
            Diagnostic(
                "python-value",
                f"Module `{frame.name}` decides by numbers what it does, and returns Python values "
                f"({', '.join(sorted({kind.__name__ for kind, _ in told})) or 'not always the same'}) that may follow "
                "from them.",
                labels_of(frame.place),
                "return tensors",
            )
        ) from error
    return _note(recorder, frame, first, tensors, changed, used, written)  # type: ignore[possibly-undefined]


def _trouble(recorder: Any, frame: Frame, error: Exception) -> Exception:
    """Return what to raise when the code cannot be tried on real tensors."""
    if isinstance(error, DataDependence):
        return error
    place = place_of(error)
    if isinstance(error, compat.DATA_ERRORS):
        return data_dependence("a call", place, frame)
    scripted = isinstance(error, torch.jit.Error) or "TorchScript" in str(error)
    if scripted or "FakeTensor" in str(error):
        return unseen(place, "a call that needs the numbers inside a tensor, and that the recorder cannot see")
    return error


def place_of(error: BaseException) -> Place | None:
    """Return the innermost line of the user's that an exception passed."""
    trace, place = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_inner(code.co_filename):
            place = Place(code, trace.tb_lasti)
        trace = trace.tb_next
    return place


def _note(
    recorder: Any,
    frame: Frame,
    result: Unpacked,
    tensors: list[torch.Tensor],
    changed: list[int],
    used: tuple[Value, ...],
    written: tuple[Value, ...],
) -> Any:
    frame.forced = True
    record = Record(
        len(recorder.records), RecordKind.MODULE, frame.module, frame.arguments.template, frame.inputs,
        recorder.marking.stage, frame.ambient, frame.place, frame, effect=True, random=True, parameters=used,
    )  # fmt: skip
    recorder.records.append(record)
    frame.parts.append(record)
    for index in changed:
        recorder.ledger.write(record, tensors[index], False, False)
    for value in written:
        fake = recorder.fakes.fakes[id(value.tensor)]
        recorder.ledger.write(record, fake, False, False)
    fakes = []
    for tensor, path in zip(result.tensors, result.paths, strict=True):
        fake = _fake_result(recorder, tensor)
        value = Value(ValueKind.RESULT, meta_of(tensor), frame.name, record=record.index, path=path)
        record.outputs.append((path, value))
        recorder.ledger.track(fake, value)
        fakes.append(fake)
    return fill(result.template, fakes)


def _forget(recorder: Any, frame: Frame) -> Callable[[], None]:
    """Drop what was recorded inside the frame before it stopped; what is returned brings it back."""
    start = frame.start
    records, parts, attributes = recorder.records[start:], list(frame.parts), list(frame.attributes)
    current = dict(recorder.ledger.current)

    def remember() -> None:
        recorder.records[start:] = records
        frame.parts[:], frame.attributes[:] = parts, attributes
        recorder.ledger.current.update(current)

    del recorder.records[start:]
    frame.parts.clear()
    frame.attributes.clear()
    for key, value in list(recorder.ledger.current.items()):
        while value.record >= start and value.before is not None:
            value = value.before
        recorder.ledger.current[key] = value
    return remember


def _real_of(recorder: Any, value: Value, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    if value.known:
        try:
            (real,) = slice_of(recorder.records, (value,)).run(recorder.examples)
            return real.clone()
        except LookupError:
            pass
    if not compat.is_fake(tensor):
        return tensor.detach().clone()
    real = real_like(tensor, seed)
    return real.clone() if real.requires_grad and not tensor.is_leaf else real  # a leaf must not be written in place


def _fake_result(recorder: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake like a result, which is no leaf: the model may write it in place."""
    fake: torch.Tensor = recorder.fakes.fake_of(tensor.detach()).requires_grad_(tensor.requires_grad)
    if not tensor.requires_grad:
        return fake
    with compat.no_torch_function(), torch.enable_grad():
        return fake.clone()


class _RealState:
    """Real parameters and buffer copies inside one module, with what the run did to them."""

    def __init__(self, recorder: Any, module: torch.nn.Module, seed: int) -> None:
        self._recorder = recorder
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._reals: dict[int, tuple[torch.Tensor, Value, int]] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._attributes: list[tuple[Any, dict[str, Any], Picture]] = []
        self._constants: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._scripted: list[Value] = []
        made: dict[int, torch.Tensor] = {}
        for child in module.modules():
            if isinstance(child, torch.jit.ScriptModule):
                self._scripted += recorder.fakes.scripted.get(id(child), [])
                continue
            for name, value in list(child.__dict__.items()):
                if isinstance(value, Unknown):
                    child.__dict__[name] = value.before
                elif isinstance(value, torch.Tensor) and not compat.is_fake(value):
                    self._constants.append((value, compat.version_of(value), value.detach().clone()))
            self._attributes.append((child, dict(child.__dict__), picture_of(child)))
            tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for slots in tables:
                for name, fake in slots.items():
                    if fake is None or id(fake) not in recorder.fakes.values:
                        continue
                    if id(fake) not in made:
                        made[id(fake)] = self._real(recorder.fakes.values[id(fake)], fake, seed)
                    self._slots.append((slots, name, fake))
                    slots[name] = made[id(fake)]

    def _real(self, value: Value, fake: torch.Tensor, seed: int) -> torch.Tensor:
        original = value.tensor
        if original is None or original.device.type == "meta" or compat.is_fake(original):
            real = real_like(fake.detach(), seed)
        else:
            real = original.detach().to("cpu", copy=True)
        if value.kind is ValueKind.PARAMETER:
            real = torch.nn.Parameter(real, requires_grad=fake.requires_grad)
        self._reals[id(real)] = (real, value, compat.version_of(real))
        if value.kind is ValueKind.BUFFER:
            self._before[id(real)] = real.clone()
        return real

    def used(self, spied: dict[int, torch.Tensor]) -> tuple[Value, ...]:
        met = tuple(value for key, (_, value, _) in self._reals.items() if key in spied or id(value.tensor) in spied)
        return (*met, *self._scripted)

    def written(self) -> tuple[Value, ...]:
        return tuple(
            value
            for real, value, version in self._reals.values()
            if value.kind is ValueKind.BUFFER
            # Kernels of batch norm do not say that they write.
            and (compat.version_of(real) != version or not torch.equal(real, self._before[id(real)]))
        )

    def leave(self) -> None:
        for slots, name, fake in self._slots:
            slots[name] = fake
        for tensor, version, copy in self._constants:
            if compat.version_of(tensor) != version:
                with compat.without_dispatch_modes(), torch.no_grad():
                    tensor.detach().copy_(copy)
        for module, before, picture in self._attributes:
            hide_numbers(self._recorder, module, before, picture)
            for name, value in list(module.__dict__.items()):
                if isinstance(value, torch.Tensor) and before.get(name) is not value:
                    self._recorder.ledger.poisoned[id(value)] = (
                        f"attribute `{name}`, which a module set while it was tried on random tensors"
                    )
                    self._recorder.ledger.alive.append(value)


@contextmanager
def _real_state(recorder: Any, module: torch.nn.Module, seed: int) -> Iterator[_RealState]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with compat.without_dispatch_modes():
            state = _RealState(recorder, module, seed)
        recorder.substituting = False
        try:
            yield state
        finally:
            recorder.substituting = True
            state.leave()
