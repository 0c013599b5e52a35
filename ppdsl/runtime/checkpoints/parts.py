"""The model's parts on one rank, under the model's own names: what optimizers, clipping and checkpoints work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.runtime.checkpoints.ownership import gather_state, load_owned, local_names, owned_keys
from ppdsl.runtime.checkpoints.subject import Subject, make_subject
from ppdsl.runtime.clipping import check_gradients, clip_gradients
from ppdsl.runtime.compiled import Compiled
from ppdsl.runtime.library import Library
from ppdsl.runtime.randomness import RandomKeys
from ppdsl.runtime.stages.drawing import Drawing
from ppdsl.runtime.world import World

__all__ = ["ModelParts", "subject_of"]


class ModelParts:
    """What a pipeline offers of its model: parameters, gradients and state of this rank.

    Args:
        library: The recordings.
        world: The ranks.

    Attributes:
        random: What this pipeline's random numbers follow from.
        scale: What the gradients of the latest step were multiplied by.
    """

    def __init__(self, library: Library, world: World) -> None:
        self._library = library
        self._world = world
        self._main: Compiled = library.compiled(with_loss=library.loss_is_known, backward=True)
        self._steps = 0
        self.random = RandomKeys(0)
        self._ties_equal = False
        self.scale = 1.0

    def __getattr__(self, name: str) -> Any:
        """Say what to use instead of what only a module has.

        Raises:
            AttributeError: Always; it is called for names that are not there.
        """
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if hasattr(torch.nn.Module, name):
            message += ": it is no torch.nn.Module (pipe.module is); for data parallelism give mesh= to pp.pipeline"
        raise AttributeError(message, name=name, obj=self)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield name and parameter of each parameter that this rank's stages use, in the model's order.

        A tied parameter comes once, under its owner's name; every rank that uses it holds a copy and optimises it, and
        the copies stay equal. Parameters that no stage uses belong to rank 0.
        """
        names = local_names(self._main)
        for name, parameter in self._library.model.named_parameters():
            if name in names:
                yield name, parameter

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of `named_parameters`."""
        for _, parameter in self.named_parameters():
            yield parameter

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - the signature of torch's own function
    ) -> torch.Tensor:
        """Scale all ranks' gradients so that their common norm is at most `max_norm`; all ranks must call it.

        It gives what `torch.nn.utils.clip_grad_norm_` gives for the whole model: a tied parameter counts once, and
        gradients that are None count nothing.

        Args:
            max_norm: The norm afterwards, at most.
            norm_type: Which norm; `float("inf")` for the largest element.
            error_if_nonfinite: Whether a norm that is not finite is an error instead of a factor.

        Returns:
            The norm before clipping, on the CPU, the same on every rank.

        Raises:
            CallError: A gradient is sparse or of one replica alone, or ranks disagree.
            RunError: The norm is not finite and `error_if_nonfinite` is true, or another rank failed.
        """
        moment = "the clipping of the gradients"
        max_norm, norm_type = float(max_norm), float(norm_type)
        try:
            check_gradients(self._main, self._world)
        except CallError as error:
            self._world.refuse(moment, error)
            raise
        wanted = f"max_norm={max_norm}, norm_type={norm_type}, error_if_nonfinite={error_if_nonfinite}"
        self._world.agree(moment, {"the clipping": wanted})
        with self._world.step():
            total, odd = clip_gradients(self._main, self._world, max_norm, norm_type, strict=error_if_nonfinite)
        if odd is not None:
            # All ranks come here with the same norm, so this is no failure of one of them: the next step can follow.
            raise odd
        return total

    def anywhere(self, moment: str, look: Callable[[], bool], facts: Mapping[str, str]) -> bool:
        """Return whether something holds on any rank; all ranks must call it.

        Args:
            moment: When this happens, to be read after "before".
            look: Tells whether it holds on this one.
            facts: What has to be equal on all ranks, by name.

        Raises:
            CallError: Ranks disagree.
            RunError: A rank failed or does not come.
        """
        try:
            here = look()
        except CallError as error:
            self._world.refuse(moment, error)
            raise
        self._world.agree(moment, facts)
        with self._world.step():
            return "1" in self._world.gather("1" if here else "0")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the model's state dictionary, under the model's own names."""
        owned = owned_keys(self._main)
        return {key: value for key, value in self._library.model.state_dict().items() if key in owned}

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state dictionary, on the CPU of every rank; all ranks must call it.

        Raises:
            CallError: Another rank does something else.
            RunError: Another rank failed.
        """
        self._world.agree("the gathering of the state", self._facts(self._main))
        with self._world.step():
            return gather_state(self._main, self._world)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load this rank's part of a state dictionary, which may be the whole model's.

        Args:
            state: Tensors by the model's own names.
            strict: Whether every name of this rank must be there, and no name that the model does not have.

        Raises:
            CallError: A name is missing or unknown.
        """
        load_owned(self._main, state, strict=strict)
        self._ties_equal = False

    @contextmanager
    def randomness(self, step: int, microbatch: int, *, evaluation: bool = False) -> Iterator[None]:
        """Let the plain model draw the random numbers that it draws in the pipeline.

        Inside, the model's modules may be called once, on this rank's whole copy of the model and in the modes that
        they are in; what the pipeline's loss function draws comes after it. Torch's own generators are put back at the
        end.

        Args:
            step: Number of the step that trains, the first one is 0.
            microbatch: Number of the micro-batch in it, from 0.
            evaluation: Whether `step` counts calls without a backward instead.

        >>> import ppdsl as pp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        >>> pp.begin(model[2], 1)
        >>> x, y = torch.randn(6, 4), torch.randn(6, 1)
        >>> pipe = pp.pipeline(model, (x[:3],), targets=y[:3], loss=torch.nn.functional.mse_loss, microbatches=2)
        >>> result = pipe.step(x, targets=y, outputs="all")
        >>> with pipe.randomness(step=0, microbatch=1):
        ...     model(x[3:]).equal(result.outputs[3:])
        True
        """
        recording = self._library.recording(with_loss=self._library.loss_is_known)
        draws = sorted((draw for program in recording.programs for draw in program.draws), key=lambda draw: draw.order)
        with Drawing(draws).by(self.random.key(step, microbatch, training=not evaluation)):
            yield

    # ---------------------------------------------------------------- for what fills, saves and loads

    def subject(self) -> Subject:
        """Return the model with its tensors and whose they are, for `pp.save`, `pp.load` and `pp.materialize`."""
        made = make_subject(self._library.model, self._main, self._world)
        return replace(made, spec=self._library.options.spec)

    @property
    def steps(self) -> int:
        """How many steps and evaluations there were, those before the loaded checkpoint included."""
        return self._steps

    def parts_to_spread(self) -> tuple[Library, Compiled, World]:
        """Return the recordings, what trains, and the ranks, for `pp.fully_shard`."""
        return self._library, self._main, self._world

    def renew(self, steps: int | None = None) -> None:
        """Take notice that parameters were filled, perhaps as new objects; tied copies are made equal again.

        Args:
            steps: How many steps there were; None: as many as before.
        """
        self._steps = self._steps if steps is None else steps
        self._ties_equal = False
        self._main = self._library.compiled(with_loss=self._library.loss_is_known, backward=True)

    def _facts(self, compiled: Compiled) -> dict[str, str]:
        """Return what all ranks have to agree on."""
        return {"the plan": compiled.plan.digest}


def subject_of(target: object) -> Subject:
    """Return what a user means by a pipeline or a model.

    Raises:
        CallError: It is neither.
    """
    if isinstance(target, ModelParts):
        return target.subject()
    if isinstance(target, torch.nn.Module):
        return make_subject(target)
    message = f"An object of type {type(target).__name__} is neither a pipeline nor a model."
    raise CallError(Diagnostic("no-model", message, help="give what pp.pipeline() returned, or a torch.nn.Module"))
