"""Calls of any shape: how each is cut, and what runs it; found once for a shape and kept for the last sixteen.

A call of another shape than the example's is recorded from its own first micro-batch; where the rows do not divide
evenly there are two recordings, one for the bigger micro-batches and one for the smaller::

    10 rows, 4 micro-batches      3 3 | 2 2
                                  bigger, smaller

The order of the computations is the example's, without the micro-batches for which there are no rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from ppdsl.diagnostics import CallError, Diagnostic
from ppdsl.plan.lowering import lower
from ppdsl.plan.messages import MessagePlan
from ppdsl.recording import compat
from ppdsl.recording.record import Recording
from ppdsl.runtime.batches.batch import cut_batch, even_split
from ppdsl.runtime.batches.joining import Joined, joined_outputs
from ppdsl.runtime.batches.probing import choose_reading, described, grown, passes
from ppdsl.runtime.batches.reading import check_rows, like_the_example, readings, split_along
from ppdsl.runtime.batches.recorded import check_kinds, recorded_axes, unclear_whole
from ppdsl.runtime.batches.sameness import flow_difference, stage_difference
from ppdsl.runtime.batches.split import Axes, BatchAxis, Split
from ppdsl.runtime.compiled import Compiled
from ppdsl.schedule.restricting import first_microbatches
from ppdsl.units import counted

__all__ = ["Maker", "Mode", "Shaped", "Shapes"]

Mode: TypeAlias = tuple[bool, bool, Any]
"""Whether there is a loss function, whether there is a backward, and the state of the model."""

_KEPT = 16
"""Shapes of calls that are remembered; the one not used for longest is forgotten."""


class Maker(Protocol):
    """What makes recordings and wires them to the ranks."""

    def record_like(self, base: Recording, leaves: Sequence[torch.Tensor], *, with_loss: bool) -> Recording:
        """Record the model with other tensors in place of the example's."""

    def assemble(
        self, recording: Recording, plan: MessagePlan, smaller: Recording | None = None, variants: Sequence[int] = ()
    ) -> Compiled:
        """Make a recording ready to run."""


@dataclass
class Shaped:
    """What is known of one shape of call.

    Attributes:
        split: How it is cut.
        compiled: What runs it, by mode and state of the model; the example's own is not kept here.
        joined: How outputs are put together, by the same.
        like_the_example: Whether every micro-batch has the example's shapes, and there are as many as in a step.
    """

    split: Split
    like_the_example: bool
    compiled: dict[Any, Compiled] = field(default_factory=dict)
    joined: dict[Any, tuple[Joined | None, ...]] = field(default_factory=dict)


class Shapes:
    """The shapes of calls that one pipeline has met.

    Args:
        maker: Records and wires.
        microbatches: Micro-batches of a step.
        batch_axis: Axes that the user has named.
        dynamic: Whether calls may differ from the example.
    """

    def __init__(self, maker: Maker, microbatches: int, batch_axis: BatchAxis, *, dynamic: bool) -> None:
        self._maker = maker
        self._microbatches = microbatches
        self._given = batch_axis
        self._dynamic = dynamic
        self._known: dict[str, int | None] = {}
        self._shaped: OrderedDict[Any, Shaped] = OrderedDict()
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()

    def forget(self) -> None:
        """Drop what holds parameters that are not the model's any more."""
        self._recordings.clear()
        for shaped in self._shaped.values():
            shaped.compiled.clear()
            shaped.joined.clear()

    @property
    def axes(self) -> dict[str, int | None]:
        """The axes that are known, by name: those of the user, and those that calls have shown."""
        return {**self._known, **self._given}

    def learn(self, axes: BatchAxis) -> None:
        """Take notice of the batch axes of inputs."""
        self._known.update(axes)

    def find(self, base: Compiled, leaves: Sequence[torch.Tensor], key: Mode) -> tuple[Shaped, Compiled]:
        """Return how a call is cut, and what runs it.

        Args:
            base: What runs the example's shapes.
            leaves: The call's tensors.
            key: Whether there is a loss function, whether there is a backward, and the state of the model.

        Raises:
            CallError: The call does not fit.
            RecordingError: The model cannot be recorded for these shapes.
        """
        place = (key[0], tuple([leaf.shape for leaf in leaves]))
        shaped = self._shaped.get(place)
        if shaped is None:
            shaped = self._shape(base, leaves, key)
        compiled = base if shaped.like_the_example else shaped.compiled.get(key)
        if compiled is None:
            compiled = shaped.compiled[key] = self._compile(base, leaves, shaped.split, key)
        self._shaped[place] = shaped
        self._shaped.move_to_end(place)
        if len(self._shaped) > _KEPT:
            self._shaped.popitem(last=False)
        return shaped, compiled

    def joined(self, shaped: Shaped, base: Compiled, compiled: Compiled, key: Mode) -> tuple[Joined | None, ...]:
        """Return how each output of a call is put together.

        Raises:
            CallError: The axis of one is not clear.
        """
        if key not in shaped.joined:

            def probe() -> Recording | None:
                return grown(base.recording, shaped.split.axes, self._recorder(base, with_loss=key[0]))

            shaped.joined[key] = joined_outputs(compiled, base, shaped.split, self._given, probe)
        return shaped.joined[key]

    # ---------------------------------------------------------------- how a call is cut

    def _shape(self, base: Compiled, leaves: Sequence[torch.Tensor], key: Mode) -> Shaped:
        routes = base.graph.inputs
        axes, findings = recorded_axes(routes, leaves, self._microbatches, self.axes)
        kinds = check_kinds(routes, leaves)
        record = self._recorder(base, with_loss=key[0])
        if not findings or all(finding.code == "ambiguous-batch" for finding in findings):
            if kinds:
                raise CallError(*kinds)
            if findings:
                self._settle_whole(base, axes, CallError(*findings), record)
            split = even_split(routes, axes, self._microbatches)
        else:
            fixed = not self._dynamic or any(finding.code == "unknown-axis" for finding in findings)
            if kinds or fixed or any(leaf.dim() != len(r.meta.shape) for leaf, r in zip(leaves, routes, strict=True)):
                raise CallError(*kinds, *findings)
            split = self._other_shape(base, leaves, record)
        if self._microbatches > 1:
            self._known.update((route.name, axis) for route, axis in zip(routes, split.axes, strict=True))
        whole = [tuple(leaf.shape) for leaf in leaves]
        recorded = tuple(route.meta.shape for route in routes)
        ends = {split.shapes(whole, 0), split.shapes(whole, -1)}
        return Shaped(split, ends == {recorded} and split.microbatches == self._microbatches)

    def _other_shape(
        self, base: Compiled, leaves: Sequence[torch.Tensor], record: Callable[[Sequence[torch.Tensor]], Recording]
    ) -> Split:
        routes, shapes, count = base.graph.inputs, [tuple(leaf.shape) for leaf in leaves], self._microbatches
        check_rows(routes, shapes)
        known = self.axes
        if count == 1:
            return split_along(routes, shapes, (None,) * len(routes), 1)
        if all(route.name in known for route in routes):
            axes = tuple(_positive(known[r.name], len(shape)) for r, shape in zip(routes, shapes, strict=True))
            return split_along(routes, shapes, axes, count)
        alike = like_the_example(routes, shapes, known, count)
        if alike is not None:
            unclear = unclear_whole(routes, alike, count, known)
            if unclear:
                self._settle_whole(base, alike, CallError(*unclear), record)
            return split_along(routes, shapes, alike, count)
        axes = choose_reading(base.recording, shapes, readings(routes, shapes, known), record)
        return split_along(routes, shapes, axes, count)

    def _settle_whole(
        self, base: Compiled, axes: Axes, unclear: CallError, record: Callable[[Sequence[torch.Tensor]], Recording]
    ) -> None:
        """Let the model decide whether inputs that look like rows of one micro-batch are given whole.

        Raises:
            unclear: It runs with more rows of the others only if these have more, too, or in both ways.
        """
        routes = base.graph.inputs
        lengths = {r.meta.shape[a] for r, a in zip(routes, axes, strict=True) if a is not None}
        others = [
            tuple(axis if n != m else 0 for n, axis in enumerate(axes))
            for m, route in enumerate(routes)
            if axes[m] is None and route.meta.shape and route.meta.shape[0] in lengths and route.name not in self.axes
        ]
        if not passes(base.recording, axes, record) or any(passes(base.recording, other, record) for other in others):
            raise unclear

    # ---------------------------------------------------------------- what runs it

    def _recorder(self, base: Compiled, *, with_loss: bool) -> Callable[[Sequence[torch.Tensor]], Recording]:
        def record(leaves: Sequence[torch.Tensor]) -> Recording:
            return self._maker.record_like(base.recording, leaves, with_loss=with_loss)

        return record

    def _compile(self, base: Compiled, leaves: Sequence[torch.Tensor], split: Split, key: Mode) -> Compiled:
        variants = split.variants
        found = [self._record(base, leaves, split, variants.index(v), key) for v in sorted(set(variants))]
        first, smaller = found[0], found[1] if len(found) > 1 else None
        for recording in found:
            difference = stage_difference(base.graph, recording.graph, ("the example", "this call"))
            if difference is not None:
                message = (
                    f"With {described(recording.graph)} the model has other stages than with the example: {difference}."
                )
                advice = "build another pipeline for such inputs"
                raise CallError(Diagnostic("other-stages", message, help=advice))
        if smaller is not None:
            difference = flow_difference(first.graph, smaller.graph, ("the bigger ones", "the smaller ones"))
            if difference is not None:
                raise CallError(_uneven(split, difference))
        schedule = first_microbatches(base.schedule, split.microbatches)
        plan = base.plan if first is base.recording and schedule is base.schedule else lower(schedule, first.graph)
        return self._maker.assemble(first, plan, smaller, variants)

    def _record(
        self,
        base: Compiled,
        leaves: Sequence[torch.Tensor],
        split: Split,
        microbatch: int,
        key: Mode,
    ) -> Recording:
        shapes = split.shapes([tuple(leaf.shape) for leaf in leaves], microbatch)
        if shapes == tuple(route.meta.shape for route in base.graph.inputs):
            return base.recording
        place = (key[0], key[2], shapes)
        if place not in self._recordings:
            pieces = cut_batch(leaves, split).microbatches[microbatch]
            examples = [piece.detach().requires_grad_(piece.requires_grad) for piece in pieces]
            self._recordings[place] = self._try(base, examples, with_loss=key[0])
            if len(self._recordings) > 2 * _KEPT:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(place)
        return self._recordings[place]

    def _try(self, base: Compiled, examples: Sequence[torch.Tensor], *, with_loss: bool) -> Recording:
        try:
            with compat.quiet_fakes():
                return self._maker.record_like(base.recording, examples, with_loss=with_loss)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            given = ", ".join(
                f"`{route.name}` {list(leaf.shape)} (recorded {list(route.meta.shape)})"
                for route, leaf in zip(base.graph.inputs, examples, strict=True)
                if tuple(leaf.shape) != route.meta.shape
            )
            message = f"The model does not run on a micro-batch with {given}: {str(error).rstrip('.')}."
            advice = "give inputs like the example, or leave such a batch out (drop_last=True)"
            raise CallError(Diagnostic("wrong-shape", message, help=advice)) from error


def _uneven(split: Split, difference: str) -> Diagnostic:
    bigger, smaller = split.sizes[0], split.sizes[-1]
    message = (
        f"Micro-batches of {counted(bigger, 'row')} and of {counted(smaller, 'row')} take different ways between the "
        f"stages: {difference}."
    )
    advice = f"give batches that divide evenly into {counted(split.microbatches, 'micro-batch')}"
    return Diagnostic("uneven-differs", message, help=advice)


def _positive(axis: int | None, axes: int) -> int | None:
    return None if axis is None else axis % axes
