"""A circular pipeline: equal stages as one compiled program over all XLA devices (torch_xla's SPMD mode).

The weights of all stages are stacked, and the stack is laid over the devices, so that each holds those of its stages.
So is the state: what every stage works on in a tick. A tick shifts it by one stage, which moves each slice to the next
device, and runs all stages at once::

    state  [ mb 3 | mb 2 | mb 1 | mb 0 ]     one slice for each stage
             mb 4 → mb 3 → mb 2 → mb 1       the next tick

Forward, loss, backward and the optimizer's step are one program (GSPMD: Xu et al. 2021, arXiv:2105.04663).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic, GraphError
from ppdsl.recording.placing import place_program
from ppdsl.recording.record import record_call
from ppdsl.runtime.outcome import StepResult
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.spmd_stages import EqualStages, equal_stages
from ppdsl.runtime.xla.start import check_installation, start
from ppdsl.units import counted

__all__ = ["Circular", "circular"]


def circular(
    model: torch.nn.Module,
    args: tuple[torch.Tensor],
    *,
    loss: Callable[..., torch.Tensor],
    microbatches: int,
) -> Circular:
    """Return a pipeline whose stages run as one compiled program on all XLA devices of this process.

    It is for chains of stages that differ in nothing but their weights, such as the blocks of a transformer: one tensor
    from each stage to the next, always of one shape; no ties, no dropout, no running statistics. Their number is a
    multiple of the number of devices. Everything else is refused with the reason.

    The process goes into SPMD mode for good, so it can have no other pipelines on XLA devices.

    Args:
        model: Marked with stages. It stays where it is; the devices get copies of its weights.
        args: The input of one micro-batch.
        loss: `loss(output, *targets)` of one micro-batch, a scalar.
        microbatches: Micro-batches in a step, all of one size; the loss is their mean.

    Raises:
        CallError: torch_xla cannot start, the process has used its devices one by one, or an argument is wrong.
        GraphError: The stages are not equal, or do not go evenly over the devices.
        MarkError: A mark is misplaced.
        RecordingError: The forward pass cannot become a graph of stages.
    """
    if microbatches < 1:
        message = f"microbatches is {microbatches}."
        raise CallError(Diagnostic("no-microbatches", message, help="a step needs at least one"))
    check_installation()
    recording = record_call(model, args)
    stages = equal_stages(recording)
    _start()
    devices = adapter.replica_count()
    if stages.count % devices:
        message = f"{counted(stages.count, 'stage')} do not go evenly over {counted(devices, 'XLA device')}."
        help_text = f"mark a multiple of {devices} stages; SPMD mode uses all devices"
        raise GraphError(Diagnostic("stages-not-even", message, help=help_text))
    return Circular(model, stages, loss, microbatches)


def _start() -> None:
    # Before anything else touches a device.
    if not adapter.start_spmd():
        message = "This process has used its XLA devices one by one, and cannot go into SPMD mode any more."
        help_text = "make the circular pipeline first, in a process of its own"
        raise CallError(Diagnostic("spmd-too-late", message, help=help_text))
    start()


class Circular:
    """A circular pipeline; made by `pp.xla.circular`.

    The parameters that are trained are the stacked ones (`parameters()`): one for each parameter of the first stage,
    with the stages as an axis in front. An optimizer that treats each element for itself (SGD, Adam, AdamW) does
    the same to them as to the model's own; `clip_grad_norm_` finds the same norm. `state_dict()` and `write_back()`
    take them apart again.

    Args:
        model: The user's model.
        stages: Its stages.
        loss: Of one micro-batch.
        microbatches: In a step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stages: EqualStages,
        loss: Callable[..., torch.Tensor],
        microbatches: int,
    ) -> None:
        self._model = model
        self._stages = stages
        self._loss = loss
        self._shape = stages.example.shape[1:]
        self._dtype = stages.example.dtype
        self._device = adapter.device_of(0)
        self.microbatches = microbatches
        place_program(stages.program, self._device)
        self._weights: dict[str, torch.Tensor] = {}
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for name, names in stages.names.items():
            stacked = torch.stack([own[each].detach() for each in names]).to(self._device)
            adapter.divide(stacked)
            trained = name in stages.trained
            self._weights[name] = torch.nn.Parameter(stacked) if trained else stacked
        # What stages work on before the first micro-batch reaches them and after the last one has left: real values,
        # for the backward of made-up ones, zeros say, may be 0 * inf.
        self._idle = stages.example.to(self._device)
        adapter.divide(self._idle)
        enters = torch.arange(stages.count).reshape(-1, *(1 for _ in self._shape)) == 0
        self._enters = enters.to(self._device)
        adapter.divide(self._enters)
        adapter.launch(self._device)

    # ---------------------------------------------------------------- running

    def step(
        self, batch: torch.Tensor, *targets: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
    ) -> StepResult:
        """Run forward and backward of a whole batch as one program.

        Gradients are added to those that `parameters()` have.

        Args:
            batch: As many micro-batches as a step has, one behind the other.
            targets: What the loss takes beside the output, cut in the same way.
            optimizer: Over `parameters()`: its step becomes part of the program, and the gradients are cleared.

        Returns:
            The loss, and that of each micro-batch.

        Raises:
            CallError: The batch does not fit.
        """
        inputs = self._cut(batch)
        goals = [self._pieces(target, f"target {number}") for number, target in enumerate(targets)]
        losses = [self._loss(output, *goal) for output, *goal in zip(self._outputs(inputs), *goals, strict=True)]
        each = torch.stack([loss.reshape(()) for loss in losses])
        total = each.mean()
        total.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        adapter.launch(self._device)
        return StepResult(adapter.host_copy(total), tuple(adapter.host_copy(each).tolist()))

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the model's output for a whole batch, on the CPU.

        Args:
            batch: As for `step`.

        Raises:
            CallError: The batch does not fit.
        """
        outputs = torch.cat(self._outputs(self._cut(batch)))
        adapter.launch(self._device)
        return adapter.host_copy(outputs)

    def _outputs(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the last stage's output for each micro-batch, pending."""
        stages = self._stages.count
        state = self._idle
        outputs: list[torch.Tensor] = []
        for tick in range(len(inputs) + stages - 1):
            entering = inputs[min(tick, len(inputs) - 1)]
            # For this spelling of a shift the compiler sends each slice to the next device; for a slice and a cat it
            # gathers the state on every device.
            shifted = torch.nn.functional.pad(state, [0, 0] * len(self._shape) + [1, -1])
            state = torch.where(self._enters, entering[None], shifted)
            adapter.divide(state)
            state = self._stages.run_all(self._weights, state)
            adapter.divide(state)
            if tick >= stages - 1:
                outputs.append(state[-1])
        return outputs

    def _cut(self, batch: torch.Tensor) -> list[torch.Tensor]:
        wanted = (self.microbatches * self._shape[0], *self._shape[1:])
        if tuple(batch.shape) != wanted or batch.dtype != self._dtype:
            message = (
                f"The batch is {_text(batch.dtype, batch.shape)}, and a step takes {_text(self._dtype, wanted)}: "
                f"{counted(self.microbatches, 'micro-batch')} of {list(self._shape)}."
            )
            raise CallError(Diagnostic("wrong-shape", message))
        return self._pieces(batch, "the batch")

    def _pieces(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        if tensor.ndim == 0 or tensor.shape[0] % self.microbatches:
            message = f"{name} has shape {list(tensor.shape)}, which does not make {self.microbatches} equal pieces."
            raise CallError(Diagnostic("wrong-shape", f"{message[0].upper()}{message[1:]}"))
        return list(tensor.to(self._device).chunk(self.microbatches))

    # ---------------------------------------------------------------- parameters

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the stacked parameters, each under the name that it has in the first stage."""
        for name, weight in self._weights.items():
            if isinstance(weight, torch.nn.Parameter):
                yield name, weight

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the stacked parameters, for an optimizer."""
        for _, parameter in self.named_parameters():
            yield parameter

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients under the model's own names, on the CPU."""
        return self._apart({name: p.grad for name, p in self.named_parameters() if p.grad is not None})

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dictionary with the trained values, under its own names, on the CPU."""
        trained = self._apart({name: parameter.detach() for name, parameter in self.named_parameters()})
        return {name: trained.get(name, value) for name, value in self._model.state_dict().items()}

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the trained values into the model's own parameters."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in self._apart({name: p.detach() for name, p in self.named_parameters()}).items():
            own[name].copy_(value)

    def _apart(self, stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in stacked.items():
            # Whole, and cut on the host: each slice on the devices would be a program of its own.
            found.update(zip(self._stages.names[name], adapter.host_copy(tensor), strict=True))
        return found


def _text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
