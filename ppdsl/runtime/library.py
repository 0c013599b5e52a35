"""The recordings of one pipeline: one for each state of the model that a step meets, made when it is first met."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch

from ppdsl.plan.messages import MessagePlan
from ppdsl.recording.dividing import Division, division_like
from ppdsl.recording.record import Recording, record_call
from ppdsl.recording.structure import fill, unpack
from ppdsl.runtime.batches.batch import check_names, cut_batch
from ppdsl.runtime.batches.lazy_targets import FirstTargets, ways_to_cut
from ppdsl.runtime.batches.shapes import Mode, Shapes
from ppdsl.runtime.compiled import Compiled, build_plan
from ppdsl.runtime.options import Options
from ppdsl.runtime.specs import freeze, shared_costs, with_model
from ppdsl.runtime.stages.compilation import Compilation
from ppdsl.runtime.tie_checks import aliases_of, check_memory, require_kept
from ppdsl.runtime.world import World
from ppdsl.runtime.wrappers import refuse_spread_ties, refuse_wrappers

__all__ = ["Library"]

Example: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


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
        shapes: The shapes of calls that were met.
        present: Lets the model hold whole parameters while it is recorded, where they are spread over processes.
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
        refuse_wrappers(model)
        self.model = model
        self.targets = targets
        self._args = args
        self._kwargs = kwargs
        self._world = world
        self.options = options
        self._example: Example = (args, kwargs)
        self.present: Callable[[], AbstractContextManager[None]] = nullcontext
        # Micro-batches are counted once the model is recorded.
        self.shapes = Shapes(self, 1, {}, dynamic=False)
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._aliases = aliases_of(model)
        self._recordings: dict[Any, Recording] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._costs = shared_costs(options.spec, model, args, kwargs, world)
        recording = self.recording(with_loss=self.loss_is_known)
        if options.spec is not None and freeze(recording, options.spec):
            recording = self.recording(with_loss=self.loss_is_known)
        graph = recording.graph
        self.options = with_model(options, recording, world)
        self.microbatches = options.count_microbatches(len({stage.key for stage in graph.stages}))
        check_names(self.options.batch_axis, graph.inputs, graph.outputs)
        self.shapes = Shapes(self, self.microbatches, self.options.batch_axis, dynamic=options.dynamic)

    @property
    def loss_is_known(self) -> bool:
        """Whether there is a loss function and its targets are known."""
        return self.options.loss is not None and self.targets is not None

    def compiled(self, *, with_loss: bool, backward: bool) -> Compiled:
        """Return what to run in the model's present state, on a batch like the example.

        Args:
            with_loss: Whether the loss function is part of it.
            backward: Whether it has a backward.
        """
        return self.example_of(self.mode(with_loss=with_loss, backward=backward))

    def mode(self, *, with_loss: bool, backward: bool) -> Mode:
        """Return the kind of a step, with the model's present state."""
        return with_loss, backward, self._state()

    def example_of(self, key: Mode) -> Compiled:
        """Return what to run on a batch like the example.

        Args:
            key: The kind of step.
        """
        if key not in self._compiled:
            with_loss, backward, _ = key
            recording = self.recording(with_loss=with_loss)
            options = self.options
            plan = build_plan(
                recording, self._world, options.schedule, self.microbatches, options.placement, backward=backward
            )
            refuse_spread_ties(recording)
            check_memory(recording.programs, plan.schedule.placement)
            self._compiled[key] = self.assemble(recording, plan)
        return self._compiled[key]

    def assemble(
        self, recording: Recording, plan: MessagePlan, smaller: Recording | None = None, variants: Sequence[int] = ()
    ) -> Compiled:
        """Return a recording with its plan, ready to run.

        Args:
            recording: The stages.
            plan: What every rank does.
            smaller: The stages for the smaller micro-batches, where there are any.
            variants: For each micro-batch whether it has `recording` (0) or `smaller` (1).
        """
        keys = tuple(dict.fromkeys(stage.key for stage in recording.graph.stages))
        recomputed = self.options.recomputed(keys)
        compiled = Compiled(recording, plan, self._world, recomputed, smaller, variants)
        compiled.compilation = Compilation(self.options.compiled(keys))
        compiled.move_parameters()
        return compiled

    def learn_targets(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> None:
        """Take the first micro-batch's targets of a call as the example, and record the loss with them.

        Raises:
            CallError: The call or its targets do not fit.
            RecordingError: The loss cannot be recorded.
        """
        base = self.compiled(with_loss=False, backward=False)
        leaves = base.recording.bind(args, kwargs, ())
        shaped, _ = self.shapes.find(base, leaves, (False, False, self._state()))
        whole = unpack(targets)
        ways, unclear = ways_to_cut(whole, shaped.split, leaves, self.options.batch_axis)
        example = (self._args, self._kwargs)
        if not shaped.like_the_example:
            piece = cut_batch(leaves, shaped.split).microbatches[0]
            example = base.recording.call([leaf.detach().clone() for leaf in piece])[:2]
        suited: list[tuple[FirstTargets, Recording]] = []
        failure: Exception | None = None
        for way in ways:
            try:
                suited.append((way, self._record(example, fill(whole.template, way.tensors), with_loss=True)))
            except Exception as error:
                # These targets are no example: the next call's may be.
                failure = error
        if len(suited) != 1:
            raise failure if unclear is None and failure is not None else unclear or RuntimeError("no targets")
        way, recording = suited[0]
        self._example = example
        self.targets = fill(whole.template, way.tensors)
        self._recordings[True, self._state()] = recording
        if self.microbatches > 1:
            self.shapes.learn(dict(zip(way.names, way.axes, strict=True)))

    def recording(self, *, with_loss: bool) -> Recording:
        """Return the recording of the model in its present state.

        Args:
            with_loss: Whether the loss function is part of it.
        """
        key = (with_loss, self._state())
        if key not in self._recordings:
            example = self._example if with_loss else (self._args, self._kwargs)
            self._recordings[key] = self._record(example, self.targets or (), with_loss=with_loss)
        return self._recordings[key]

    def record_like(self, base: Recording, leaves: Sequence[torch.Tensor], *, with_loss: bool) -> Recording:
        """Return a recording of the model in its present state, made with other tensors.

        Args:
            base: A recording of the same call; a spec divides the model as it did there.
            leaves: The tensors, in the order of the graph's inputs.
            with_loss: Whether the loss function is part of it.
        """
        args, kwargs, targets = base.call(leaves)
        recording = self._record((args, kwargs), targets, with_loss=with_loss, division=division_like(base))
        return recording.with_examples_of(base)

    def _record(
        self, example: Example, targets: tuple[Any, ...], *, with_loss: bool, division: Division | None = None
    ) -> Recording:
        args, kwargs = example
        loss = self.options.loss if with_loss else None
        spec = division or self.options.spec
        given = targets if with_loss else ()
        with self.present():
            return record_call(self.model, args, kwargs, loss=loss, targets=given, spec=spec, costs=self._costs)

    def _state(self) -> tuple[Any, ...]:
        modules, parameters = _contents(self.model)
        if len(parameters) != len(self._parameters) or any(map(operator.is_not, parameters, self._parameters)):
            require_kept(self._aliases, self.model)
            self._parameters = parameters
            self._recordings.clear()
            self._compiled.clear()
            self.shapes.forget()
        training = tuple([module.training for module in modules])
        frozen = tuple([parameter.requires_grad for parameter in parameters])
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


def _contents(model: torch.nn.Module) -> tuple[list[torch.nn.Module], tuple[torch.nn.Parameter, ...]]:
    """Return what `modules()` and `parameters()` give, several times faster: every step asks for it."""
    modules: dict[int, torch.nn.Module] = {}
    parameters: dict[int, torch.nn.Parameter] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        if id(module) in modules:
            continue
        modules[id(module)] = module
        for parameter in module._parameters.values():  # noqa: SLF001 - parameters(recurse=False) costs a microsecond each
            if parameter is not None:
                parameters[id(parameter)] = parameter
        children = module._modules  # noqa: SLF001 - the same
        if children:
            todo += [child for child in reversed(children.values()) if child is not None]
    return list(modules.values()), tuple(parameters.values())


def _settings(module: torch.nn.Module) -> str:
    # Of torch's own modules only: what a user's module says of itself may differ between processes.
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
