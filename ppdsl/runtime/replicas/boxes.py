"""Stages whose parameters are spread over the replicas by torch's `fully_shard` (FSDP2).

A program calls the user's modules one by one and never a stage as a whole, so torch's hooks around a module's forward
would not fit. Each stage gets a module of its own instead, a box, that holds the modules which own its parameters. The
box is sharded; before a computation it is gathered, and programs find whole parameters where they always were. When
the last backward of a stage is over, one empty pass through its box makes torch scatter the mean of all gradients that
have gathered. Only public functions of torch take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from ppdsl.recording.programs import StageProgram
from ppdsl.schedule.action import Action

__all__ = ["Boxes"]

Place = tuple[torch.nn.Module, str]


class _Box(torch.nn.Module):
    """The modules that own a stage's parameters. Its forward does nothing: it is there for the hooks around it."""

    def __init__(self, owners: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.owners = torch.nn.ModuleList(owners)

    def forward(self, anchor: torch.Tensor) -> torch.Tensor:
        return anchor * 1.0


class Boxes:
    """The sharded stages of one process.

    Args:
        model: The user's model.
        parameters: For each stage what is to be sharded.
        mesh: The replicas.
        reshard_after_forward: Whether parameters are given up after each computation instead of after the last one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[int, Sequence[torch.nn.Parameter]],
        mesh: Any,
        *,
        reshard_after_forward: bool,
    ) -> None:
        self.reshard_after_forward = reshard_after_forward
        self._boxes: list[Any] = []
        self._places: list[tuple[list[Place], torch.nn.Parameter, Any]] = []
        self._box_of: dict[int, int] = {}
        for wanted in parameters.values():
            if wanted:
                self._add(model, wanted, mesh)

    def _add(self, model: torch.nn.Module, wanted: Sequence[torch.nn.Parameter], mesh: Any) -> None:
        places: dict[int, list[Place]] = {id(parameter): [] for parameter in wanted}
        owners: dict[torch.nn.Module, None] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) in places:
                    places[id(parameter)].append((module, name))
                    owners[module] = None
        box: Any = _Box(list(owners))
        others = {parameter for parameter in box.parameters() if id(parameter) not in places}
        # When they are given up is said below: the box's own forward is only the empty pass.
        fully_shard(box, mesh=mesh, reshard_after_forward=False, ignored_params=others)
        spread = [getattr(*where[0]) for where in places.values()]
        box.unshard()
        whole = [getattr(*where[0]) for where in places.values()]
        box.reshard()
        for where, full, part in zip(places.values(), whole, spread, strict=True):
            self._places.append((where, full, part))
            self._box_of[id(full)] = len(self._boxes)
        self._boxes.append(box)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of a program is one of those that are spread."""
        return id(parameter) in self._box_of

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold whole parameters while the body looks at their shapes; they have no values meanwhile.

        Nothing is gathered, so replicas need not come here together.
        """
        try:
            for where, full, part in self._places:
                full.requires_grad_(part.requires_grad)
                for module, name in where:
                    setattr(module, name, full)
            yield
        finally:
            for where, _, part in self._places:
                for module, name in where:
                    setattr(module, name, part)

    # ---------------------------------------------------------------- a step

    def around(
        self, programs: Sequence[StageProgram], reduces: Callable[[], bool]
    ) -> Callable[[Action, bool, Callable[[int], None]], Callable[[int], None]]:
        """Return what is put around the computations of some stages.

        Args:
            programs: The stages.
            reduces: Whether the present step takes the mean of gradients.
        """
        used = {
            program.stage: sorted({self._box_of[id(p)] for _, p in program.parameters if self.holds(p)})
            for program in programs
        }

        def wrap(action: Action, last: bool, call: Callable[[int], None]) -> Callable[[int], None]:  # noqa: FBT001
            boxes = [self._boxes[index] for index in used[action.stage]]
            if not boxes:
                return call

            def gathered(microbatch: int) -> None:
                for box in boxes:
                    box.unshard()
                call(microbatch)
                for box in boxes:
                    if last and reduces():
                        _scatter(box)
                    if last or self.reshard_after_forward:
                        box.reshard()

            return gathered

        return wrap

    def rest(self) -> None:
        """Give up what is still gathered when a step ends, however it does."""
        for box in self._boxes:
            box.reshard()


def _scatter(box: Any) -> None:
    """Let torch take the mean of the gradients that have gathered, and leave to each replica its shard."""
    anchor = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        box(anchor).backward()
