"""How every collective runs: one small program, the same on every local device, with nothing else in it.

XLA's rule is that all replicas of a collective run the same program. A replica that runs another one, or none, makes
the others wait, and torch_xla then ends the process. So a collective never shares a program with a stage's own work:
what is pending on a device is launched first, and the programs of all devices are compared before any of them starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from ppdsl.diagnostics import Diagnostic, RunError
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.stuck import WATCH

__all__ = ["Program", "launch_everywhere", "program_texts", "wait_for"]

Program = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""What one replica does with its tensor: it only adds operations, equal ones on every device."""


def launch_everywhere(inputs: Mapping[int, torch.Tensor], program: Program) -> list[tuple[torch.Tensor, ...]]:
    """Launch `program` on every local device and return at once.

    Args:
        inputs: Tensors of one shape and element type, by their device's position. Devices that are not named take
            part with zeros of that shape.
        program: What each replica does.

    Returns:
        For every local device what its program returned.

    Raises:
        RunError: The programs of two devices differ.
    """
    with adapter.ALL_DEVICES:  # autograd runs the backward of different devices in threads of its own
        tensors = _materialised(inputs)
        try:
            outputs = _pending(tensors, program)
            _compare(outputs)
            WATCH.transfer("A collective between XLA devices", len(tensors))
            adapter.launch_all(outputs)
            return outputs
        finally:  # whatever failed, no collective stays pending
            for position in range(len(tensors)):
                adapter.forget_collectives(adapter.device_of(position))


def program_texts(inputs: Mapping[int, torch.Tensor], program: Program) -> list[str]:
    """Return the HLO text of `program` for every local device, and launch none.

    Args:
        inputs: As for `launch_everywhere`.
        program: What each replica does.
    """
    with adapter.ALL_DEVICES:
        tensors = _materialised(inputs)
        try:
            return [adapter.program_text(made) for made in _pending(tensors, program)]
        finally:
            for position in range(len(tensors)):
                adapter.forget_collectives(adapter.device_of(position))


def wait_for(tensors: Sequence[torch.Tensor], timeout: float, what: str) -> None:
    """Return when launched tensors are computed.

    Args:
        tensors: Of any XLA devices.
        timeout: Seconds to wait in all.
        what: What is waited for, as a sentence begins ("The all_reduce").

    Raises:
        RunError: They are not computed in time.
    """
    ready = threading.Semaphore(0)
    for tensor in tensors:
        adapter.when_ready(tensor, ready.release)
    if not all(ready.acquire(timeout=timeout) for _ in tensors):
        message = f"{what} is not finished after {timeout:g} seconds: a replica does not take part."
        raise RunError(Diagnostic("collective-timed-out", message, help="run `ppdsl doctor --device xla`"))


def _materialised(inputs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor of every local device, computed or on its way."""
    model = next(iter(inputs.values()))
    tensors: list[torch.Tensor] = []
    for position in range(adapter.device_count()):
        device = adapter.device_of(position)
        if position in inputs:
            # All that is pending, not this tensor alone: what autograd keeps would otherwise be computed once more.
            adapter.launch(device)
            tensors.append(inputs[position].detach())
        else:
            stand_in = torch.zeros(model.shape, dtype=model.dtype, device=device)
            adapter.launch_tensors([stand_in], device)
            tensors.append(stand_in)
    return tensors


def _pending(tensors: Sequence[torch.Tensor], program: Program) -> list[tuple[torch.Tensor, ...]]:
    with torch.no_grad():
        return [tuple(program(tensor)) for tensor in tensors]


def _compare(outputs: Sequence[tuple[torch.Tensor, ...]]) -> None:
    keys = [adapter.program_key(made) for made in outputs]
    other = next((position for position, key in enumerate(keys) if key != keys[0]), None)
    if other is not None:
        message = f"The collective would be another program on xla:{other} than on xla:0; nothing was launched."
        help_text = "give tensors of one shape, element type and layout, none a view of another"
        raise RunError(Diagnostic("replica-programs-differ", message, help=help_text))
