"""The recordings of one pipeline: one for each state of the model that a step meets, made when it is first met."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch

from ppdsl.recording.record import Recording, record_call
from ppdsl.recording.structure import Path, fill, unpack
from ppdsl.runtime.batch import check_names, slice_like, split_batch
from ppdsl.runtime.compiled import Compiled, build_plan
from ppdsl.runtime.options import Options
from ppdsl.runtime.specs import freeze, shared_costs, with_model
from ppdsl.runtime.world import World

__all__ = ["Library"]


class Library:
    """Makes and keeps recordings and their plans.

    A recording holds for the modes of the modules, the frozen parameters and the autocast state that it was made in.
    When a call finds them changed, the model is recorded again from the same example; going back finds the first one.
    Where parameter objects were replaced by others (`to_empty` does so), everything is recorded again: programs hold
    the objects themselves.

    Args:
        model: The user's model.
        args: Example arguments for one micro-batch.
        kwargs: Example keyword arguments for one micro-batch.
        targets: Example targets for one micro-batch; None when the loss is recorded later.
        world: The ranks.
        options: The user's choices.

    Attributes:
        options: The user's choices, with what the spec says of the recorded stages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: tuple[Any, ...] | None,
        world: World,
        options: Options,
    ) -> None:
        self.model = model
        self.targets = targets
        self._args = args
        self._kwargs = kwargs
        self._world = world
        self.options = options
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._recordings: dict[Any, Recording] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._costs = shared_costs(options.spec, model, args, kwargs, world)
        recording = self._recording(with_loss=self.loss_is_known)
        if options.spec is not None and freeze(recording, options.spec):
            recording = self._recording(with_loss=self.loss_is_known)
        graph = recording.graph
        self.options = with_model(options, recording, world)
        self.microbatches = options.count_microbatches(len({stage.key for stage in graph.stages}))
        check_names(self.options.batch_axis, graph.inputs, graph.outputs)

    @property
    def loss_is_known(self) -> bool:
        """Whether there is a loss function and its targets are known."""
        return self.options.loss is not None and self.targets is not None

    def compiled(self, *, with_loss: bool, backward: bool) -> Compiled:
        """Return what to run in the model's present state.

        Args:
            with_loss: Whether the loss function is part of it.
            backward: Whether it has a backward.
        """
        key = (with_loss, backward, self._state())
        if key not in self._compiled:
            recording = self._recording(with_loss=with_loss)
            options = self.options
            plan = build_plan(
                recording, self._world, options.schedule, self.microbatches, options.placement, backward=backward
            )
            keys = tuple(dict.fromkeys(stage.key for stage in recording.graph.stages))
            self._compiled[key] = Compiled(recording, plan, self._world, options.recomputed(keys))
            self._compiled[key].move_parameters()
        return self._compiled[key]

    def learn_targets(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> None:
        """Take the first micro-batch's targets of a call as the example, and record the loss with them.

        Raises:
            CallError: The call or its targets do not fit.
            RecordingError: The loss cannot be recorded.
        """
        recording = self._recording(with_loss=False)
        leaves = recording.bind(args, kwargs, ())
        batch = split_batch(recording.graph.inputs, leaves, self.microbatches, self.options.batch_axis)
        whole = unpack(targets)
        axes, rows = self.options.batch_axis, batch.rows or 1
        cut = [
            slice_like(_target_name(path), leaf, rows, self.microbatches, axes).detach()
            for path, leaf in zip(whole.paths, whole.tensors, strict=True)
        ]
        self.targets = fill(whole.template, cut)
        try:
            self._recording(with_loss=True)
        except Exception:
            # These targets were no example: the next call's may be.
            self.targets = None
            raise

    def _recording(self, *, with_loss: bool) -> Recording:
        key = (with_loss, self._state())
        if key not in self._recordings:
            loss = self.options.loss if with_loss else None
            targets = (self.targets or ()) if with_loss else ()
            self._recordings[key] = record_call(
                self.model,
                self._args,
                self._kwargs,
                loss=loss,
                targets=targets,
                spec=self.options.spec,
                costs=self._costs,
            )
        return self._recordings[key]

    def _state(self) -> tuple[Any, ...]:
        parameters = tuple(self.model.parameters())
        if len(parameters) != len(self._parameters) or any(map(operator.is_not, parameters, self._parameters)):
            self._parameters = parameters
            self._recordings.clear()
            self._compiled.clear()
        training = tuple(module.training for module in self.model.modules())
        frozen = tuple(parameter.requires_grad for parameter in parameters)
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return training, frozen, autocast

    def fingerprint(self) -> str:
        """Return a hash of the whole model's modules and parameters, also of what lies inside one stage."""
        lines = [
            f"{name} {type(module).__qualname__} {_settings(module)}" for name, module in self.model.named_modules()
        ]
        lines += [
            f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self.model.named_parameters(remove_duplicate=False)
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def _target_name(path: Path) -> str:
    """Return how a user writes the way to a target, as the recorded input will be named."""
    return "targets" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)


def _settings(module: torch.nn.Module) -> str:
    # Of torch's own modules only: what a user's module says of itself may differ between processes.
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
