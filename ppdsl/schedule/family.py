"""What a schedule family is: its builder, and what it demands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ppdsl.diagnostics import Diagnostic
from ppdsl.graph.ir import StageGraph
from ppdsl.schedule.action import Action
from ppdsl.schedule.arguments import Argument, Parameter
from ppdsl.schedule.arrangement import Arrangement

__all__ = ["Builder", "Demand", "Family", "Named", "Pairing", "Rows"]

Rows = tuple[tuple[Action, ...], ...]
"""For each rank its actions in order."""

Builder = Callable[..., Rows]
"""Graph, placement, micro-batches, ranks, and by name the parameters that reach the builder -> rows; pure."""

Demand = Callable[[StageGraph, Sequence[int], int], Diagnostic | None]
"""Graph, placement, micro-batches -> what is wrong with them for this family, or None."""

Pairing = Callable[[int, int], Mapping[Action, Action]]
"""Ranks, micro-batches -> actions that may run together with the one after them, and that one; on a chain."""


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule family.

    Attributes:
        name: What users write.
        build: The builder.
        summary: A few words for lists and help.
        backward: Whether it has backwards.
        splits_backward: Whether its backwards are split into I and W (at least some of them).
        demands: What must hold of graph, placement and micro-batches before it can be built.
        parameters: What users can choose, in the order of arguments without names.
        arrangement: Which placements it takes: any that is given, a loop, or a V.
        chunks: Stages on each rank; None: any number.
        aliases: Other names users type, with the arguments they stand for.
        pairing: The pairs that may run together, of families that have some.
    """

    name: str
    build: Builder
    summary: str
    backward: bool = True
    splits_backward: bool = False
    demands: tuple[Demand, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    arrangement: Arrangement = Arrangement.GIVEN
    chunks: int | None = None
    aliases: tuple[str, ...] = ()
    pairing: Pairing | None = None

    @property
    def signature(self) -> str:
        """The name with what may be chosen, for lists and help."""
        inside = ", ".join(parameter.example for parameter in self.parameters)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True, slots=True)
class Named:
    """A family with the arguments a user gave it.

    Attributes:
        family: The family.
        arguments: Values by the parameters' names; parameters that were left out are missing.
    """

    family: Family
    arguments: Mapping[str, Argument] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def chunks(self) -> int | None:
        """Stages on each rank that the family or its argument `v` asks for; None when it takes any number."""
        v = self.arguments.get("v")
        return v if isinstance(v, int) else self.family.chunks

    def __str__(self) -> str:
        choices = {parameter.name: bool(parameter.choices) for parameter in self.family.parameters}
        inside = ", ".join(str(v) if choices[name] else f"{name}={v}" for name, v in self.arguments.items())
        return f"{self.family.name}({inside})" if inside else self.family.name
