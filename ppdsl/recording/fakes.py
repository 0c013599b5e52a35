"""Parameters and buffers without data: swapped into the model while it is recorded."""

from __future__ import annotations

from typing import Any

import torch

from ppdsl.recording import compat
from ppdsl.recording.tape import Value, ValueKind, meta_of

__all__ = ["FakeState", "real_like"]


class FakeState:
    """Fakes for the parameters and buffers of a model, in place of the real ones between `enter` and `leave`.

    Fakes are made on the CPU whatever the model's device: a fake of a backend that is not loaded would abort the
    process in autograd. A tensor that the model holds under two names gets one fake, so that ties stay visible.

    Attributes:
        mode: The fake mode all fakes belong to.
        values: Value of each fake and of each real parameter and buffer, by id.
        fakes: The fake of each real parameter and buffer, by the real one's id.
        reals: The real tensor of each fake, by the fake's id.
        scripted: Parameters of each TorchScript module, by the module's id.
        aliases: All names of each tensor, by the real one's id, in the model's order.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.mode = compat.make_fake_mode()
        self.values: dict[int, Value] = {}
        self.fakes: dict[int, torch.Tensor] = {}
        self.reals: dict[int, torch.Tensor] = {}
        self.aliases: dict[int, list[str]] = {}
        self.scripted: dict[int, list[Value]] = {}
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for prefix, module in model.named_modules(remove_duplicate=True):
            if isinstance(module, torch.jit.ScriptModule):
                self._add_script(prefix, module)
                continue
            for kind, slots in ((ValueKind.PARAMETER, module._parameters), (ValueKind.BUFFER, module._buffers)):
                for name, tensor in slots.items():
                    if tensor is not None:
                        self._add(kind, f"{prefix}.{name}" if prefix else name, module, name, tensor)
                        self._slots.append((slots, name, tensor))

    def _add(self, kind: ValueKind, full: str, module: Any, name: str, tensor: torch.Tensor) -> None:
        self.aliases.setdefault(id(tensor), []).append(full)
        if id(tensor) in self.values:
            return
        fake = self._first_fake_of(tensor, parameter=kind is ValueKind.PARAMETER)
        value = Value(kind, meta_of(tensor), full, holder=(module, name), tensor=tensor)
        self.values[id(tensor)] = self.values[id(fake)] = value
        self.fakes[id(tensor)] = fake
        self.reals[id(fake)] = tensor

    def _add_script(self, prefix: str, module: torch.nn.Module) -> None:
        """Compiled code holds its tensors itself and cannot run on fakes: they stay real and are only known by name."""
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            self.aliases.setdefault(id(parameter), []).append(full)
            value = Value(ValueKind.PARAMETER, meta_of(parameter), full, tensor=parameter)
            self.values[id(parameter)] = value
            self.scripted.setdefault(id(module), []).append(value)

    def _first_fake_of(self, tensor: torch.Tensor, *, parameter: bool) -> torch.Tensor:
        """Return the fake of a parameter or buffer, before anything is recorded: then there is a quicker way."""
        if compat.is_wrapper(tensor) or tensor.layout != torch.strided or not tensor.is_leaf:
            return self.fake_of(tensor, parameter=parameter)
        fake = compat.new_fake(self.mode, tensor, parameter=parameter).requires_grad_(tensor.requires_grad)
        return _with_attributes(fake, tensor) if parameter else fake

    def fake_of(self, tensor: torch.Tensor, *, parameter: bool = False) -> torch.Tensor:
        """Return a tensor without data that looks like `tensor` on the CPU."""
        fake: torch.Tensor
        if compat.is_wrapper(tensor) or tensor.layout != torch.strided:
            fake = self.mode.from_tensor(tensor)
        else:
            with self.mode, torch.no_grad():
                fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if parameter:
            fake = _with_attributes(torch.nn.Parameter(fake, requires_grad=tensor.requires_grad), tensor)
        elif tensor.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
            if not tensor.is_leaf:  # such a tensor may be written in place
                with torch.enable_grad():
                    fake = fake.clone()
        return fake

    def enter(self) -> None:
        """Put the fakes in."""
        for slots, name, tensor in self._slots:
            slots[name] = self.fakes[id(tensor)]

    def leave(self) -> None:
        """Put the real ones back."""
        for slots, name, tensor in self._slots:
            slots[name] = tensor


def _with_attributes(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    for name, attribute in getattr(tensor, "__dict__", {}).items():
        if name not in fake.__dict__:
            fake.__dict__[name] = attribute
    return fake


def real_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a small random tensor with the size, layout, type and requires_grad of `tensor`.

    Integers are 0: any table has that row.
    """
    real = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if real.is_floating_point() or real.is_complex():
        generator = torch.Generator().manual_seed(seed)
        real.copy_(torch.randn(tensor.size(), generator=generator) * 0.1)
    elif real.dtype == torch.bool:
        generator = torch.Generator().manual_seed(seed)
        real.copy_(torch.rand(tensor.size(), generator=generator) < 0.5)
    else:
        real.zero_()
    return real.requires_grad_(tensor.requires_grad)
