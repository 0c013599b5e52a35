"""The modules of an outline as a tree: children, elements of containers, aliases, calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ppdsl.graph.outline import ModelOutline, ModuleCall, ParameterInfo
from ppdsl.units import Bytes

__all__ = ["ModuleTree", "above", "spell"]


def above(name: str) -> Iterator[str]:
    """Yield a dotted name and the names around it, the innermost first; the last is the model itself.

    >>> list(above("h.3.attn"))
    ['h.3.attn', 'h.3', 'h', '']
    """
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def spell(name: str) -> str:
    """Return a module's name as a spec writes it.

    >>> spell("transformer.h.3.attn"), spell("")
    ('transformer.h[3].attn', 'the model itself')
    """
    if not name:
        return "the model itself"
    text = ""
    for piece in name.split("."):
        text += f"[{piece}]" if text and piece.isdecimal() else f".{piece}" if text else piece
    return text


@dataclass(frozen=True)
class ModuleTree:
    """Look-up tables of an outline.

    A module object with several names is one module: its first name stands for it.

    Attributes:
        outline: What the tables are made from.
        first: For each name, aliases too, the first name of that module.
        names: For each first name all names of that module.
        children: For each name (as written, aliases too) the names right under it, in the model's order.
        elements: For each name of a container its children with numbers, ascending.
        calls: For each first name its calls, in order.
        parameters: By every name.
        own_parameters: For each first name of a module the first names of the parameters right in it.
    """

    outline: ModelOutline
    first: dict[str, str]
    names: dict[str, tuple[str, ...]]
    children: dict[str, tuple[str, ...]]
    elements: dict[str, dict[int, str]]
    calls: dict[str, tuple[ModuleCall, ...]]
    parameters: dict[str, ParameterInfo]
    own_parameters: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, outline: ModelOutline) -> ModuleTree:
        """Make the tables of an outline."""
        names = {module.name: (module.name, *module.aliases) for module in outline.modules}
        first = {name: module for module, all_names in names.items() for name in all_names}
        children: dict[str, list[str]] = {}
        for name in first:
            if name:
                children.setdefault(name.rpartition(".")[0], []).append(name)
        elements = {
            parent: {int(last): child for child in below if (last := child.rpartition(".")[2]).isdecimal()}
            for parent, below in children.items()
        }
        calls: dict[str, list[ModuleCall]] = {}
        for call in outline.calls:
            calls.setdefault(first.get(call.module, call.module), []).append(call)
        parameters = {name: parameter for parameter in outline.parameters for name in parameter.names}
        for name in (name for step in outline.steps for name in step.parameters):
            # A step may use a parameter that no module of the model has.
            parameters.setdefault(name, ParameterInfo((name,), 0, Bytes(0), trainable=False))
        return cls(
            outline=outline,
            first=first,
            names=names,
            children={name: tuple(below) for name, below in children.items()},
            elements={name: dict(sorted(below.items())) for name, below in elements.items() if below},
            calls={name: tuple(sorted(some, key=lambda call: call.number)) for name, some in calls.items()},
            parameters=parameters,
            own_parameters={module.name: module.parameters for module in outline.modules},
        )

    def inside(self, name: str) -> Iterator[str]:
        """Yield the first names of a module and of all modules in it, each once, the outer ones first."""
        waiting, seen = [name], set()
        while waiting:
            at = waiting.pop()
            if self.first[at] in seen:
                continue
            seen.add(self.first[at])
            yield self.first[at]
            waiting += reversed(self.children.get(at, ()))

    def is_called(self, name: str) -> bool:
        """Return whether forward calls this module or one in it."""
        return any(inner in self.calls for inner in self.inside(name))

    def parameters_of(self, name: str) -> tuple[str, ...]:
        """Return the first names of the parameters in a module and in all modules in it."""
        found = (parameter for inner in self.inside(name) for parameter in self.own_parameters.get(inner, ()))
        return tuple(dict.fromkeys(self.parameters[p].names[0] if p in self.parameters else p for p in found))

    def __contains__(self, name: object) -> bool:
        return name in self.first
