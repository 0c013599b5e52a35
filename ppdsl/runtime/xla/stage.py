"""One stage on an XLA device: what its programs read and keep.

A program is compiled once for a stage and kind of action if nothing in it changes but data. So `.grad` is there before
the first backward, random numbers begin at a seed that is set, and what autograd saves of a weight is the weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from ppdsl.diagnostics import Diagnostic, PpdslWarning, Severity, render_plain
from ppdsl.recording import compat
from ppdsl.recording.callables import EnterAmbient, ReadAttribute
from ppdsl.recording.programs import StageProgram
from ppdsl.runtime.layout import dtype_of
from ppdsl.runtime.stages.recompute import Recomputed
from ppdsl.runtime.stages.stage import StageState
from ppdsl.runtime.xla.norms import NormsWrittenOut
from ppdsl.runtime.xla.recompute import Again

__all__ = ["Move", "Replica", "Replicas", "XlaStage", "pack", "unpack"]

Run = Callable[..., Sequence[torch.Tensor]]
Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Replicas: TypeAlias = "dict[tuple[int, torch.device], Replica]"


class _Turned:
    """Stands for `weight.t()`, which torch_xla would keep as a copy for every micro-batch in flight."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def pack(tensor: torch.Tensor) -> Any:
    """Return what autograd keeps in the place of a tensor that it saves."""
    base, node = tensor._base, tensor.grad_fn  # noqa: SLF001 - whose view it is; there is no public name
    if base is None or node is None or node.name() != "TBackward0":
        # What a node made and keeps would keep the node: without a backward, of a stage that nobody uses, for ever.
        return tensor if node is None else tensor.detach()
    # The weight itself was turned, not a part of it or another view: autograd goes straight on to its gradient.
    whole = getattr(node.next_functions[0][0], "variable", None) is base
    return _Turned(base) if whole else tensor.detach()


def unpack(packed: Any) -> torch.Tensor:
    """Return the tensor that was packed."""
    compat.unpacked_harmlessly()
    return packed.weight.detach().t() if isinstance(packed, _Turned) else packed


def _autocast() -> AbstractContextManager[Any]:
    """Return the autocast of the CPU, which models are recorded with, for XLA devices."""
    if not torch.is_autocast_enabled("cpu"):
        return nullcontext()
    return torch.autocast("xla", dtype=torch.get_autocast_dtype("cpu"))


class Replica:
    """One device's copy of a tensor that a stage on another device holds: a tied parameter, a shared table.

    Args:
        owner: The user's own tensor.
        device: Where the copy is.
        move: Moves a tensor to another device.
    """

    def __init__(self, owner: torch.Tensor, device: torch.device, move: Move) -> None:
        self.owner = owner
        self._device = device
        self._move = move
        self._version = -1
        self._source: torch.device | None = None
        self.copy = self._made()

    def _made(self) -> torch.Tensor:
        moved = torch.zeros_like(self.owner, device=self._device)
        if isinstance(self.owner, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=self.owner.requires_grad)
        return moved

    def refresh(self, owner: torch.Tensor) -> None:
        """Take the values of the owner, which may be another one by now, where they have changed."""
        if owner is not self.owner:
            self.owner, self._version = owner, -1
        version = compat.version_of(self.owner)
        if version == self._version and self._source == self.owner.device:
            return
        self._version, self._source = version, self.owner.device
        with torch.no_grad():
            self.copy.copy_(self._move(self.owner.detach(), self._device))


class XlaStage:
    """A stage's state with what XLA needs around it.

    Args:
        state: The stage.
        device: Where it runs.
        move: Moves a tensor to another device.
        replicas: The copies of all stages, by owner and device; further ones are added.
    """

    def __init__(self, state: StageState, device: torch.device, move: Move, replicas: Replicas) -> None:
        self.state = state
        self.device = device
        self._places: list[tuple[torch.nn.Module, str, Replica]] = []
        for module, name, tensor in _tensors_of(state.program):
            if tensor.device != device and not tensor.is_meta:
                key = (id(tensor), device)
                if key not in replicas:
                    replicas[key] = Replica(tensor, device, move)
                self._places.append((module, name, replicas[key]))
        self.replicas = tuple(dict.fromkeys(replica for _, _, replica in self._places))
        self._untouched: list[tuple[Any, str, torch.Tensor]] = []
        for tied in state.tied:
            for replica in self.replicas:
                if tied.parameter is replica.owner:
                    tied.parameter = replica.copy  # type: ignore[assignment]
        state.wrap(self._around)
        compat.unpacked_harmlessly()
        own = {id(tied.parameter) for tied in state.tied} | {id(replica.owner) for replica in self.replicas}
        self._parameters = [p for _, p in state.program.parameters if id(p) not in own and p.requires_grad]

    def _around(self, run: Run) -> Run:
        recomputed, program, stage = isinstance(run, Recomputed), self.state.program, self.state.stage
        inner: Run = program if recomputed else run
        again = recomputed and not stage.says
        if recomputed and not again:
            message = f"Stage {stage.label} is not recomputed: it says losses or metrics, which XLA would hear twice."
            self.state.warnings.append(message)
            found = Diagnostic("stage-not-recomputed", message, severity=Severity.WARNING, help="leave it out")
            warnings.warn(PpdslWarning(render_plain([found])), stacklevel=2)
        targets = [node.target for node in program.module.graph.nodes]
        casts = any(isinstance(target, EnterAmbient) and target.ambient.autocast for target in targets)
        dtypes = [dtype_of(result.meta.dtype) for result in program.results]

        def call(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            # Tensors that forward makes without saying where belong here, as they belong to the CPU on the CPU.
            with self._on_device(), saved_tensors_hooks(pack, unpack), self.device, NormsWrittenOut(), _autocast():
                results = inner(*tensors)
            if not (casts or torch.is_autocast_enabled("cpu")):
                return results
            # What autocast leaves in which type is not quite the same on each type of device.
            return [result.to(dtype) for result, dtype in zip(results, dtypes, strict=True)]

        return Again(call, program) if again else call

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Let the modules find this device's copies of what other devices hold."""
        for module, name, replica in self._places:
            _put(module, name, replica.copy)
        try:
            yield
        finally:
            for module, name, replica in self._places:
                _put(module, name, replica.owner)

    # ---------------------------------------------------------------- around a step

    def begin(self) -> None:
        """Make the gradients that backward adds to, where there are none."""
        for module, name, replica in self._places:
            replica.refresh(getattr(module, name))
        self._untouched = []
        if not self.state.runs_backward:
            return
        for parameter in self._parameters:
            self._zero(parameter, "grad", parameter)
        for tied in self.state.tied:
            self._zero(tied, "gradient", tied.parameter)

    def _zero(self, holder: Any, name: str, parameter: torch.Tensor) -> None:
        gradient = getattr(holder, name)
        if gradient is None:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            setattr(holder, name, gradient)
            self._untouched.append((holder, name, gradient))

    def end(self) -> None:
        """Take the gradients away that no backward has added to: such a parameter has none."""
        for holder, name, gradient in self._untouched:
            if compat.version_of(gradient) == 0 and getattr(holder, name) is gradient:
                setattr(holder, name, None)
        self._untouched = []


def _put(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    for table in (module._parameters, module._buffers):  # noqa: SLF001 - setattr would copy nothing but check much
        if name in table:
            table[name] = value  # type: ignore[assignment]
            return
    module.__dict__[name] = value


def _tensors_of(program: StageProgram) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Yield module, attribute and tensor of everything that the program's calls find in modules."""
    for module in program.module.modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001 - each module's own, under its own names
            for name, tensor in table.items():
                if tensor is not None:
                    yield module, name, tensor
    for node in program.module.graph.nodes:
        if isinstance(node.target, ReadAttribute):
            value = getattr(node.target.module, node.target.attribute)
            if isinstance(value, torch.Tensor):
                yield node.target.module, node.target.attribute, value
