"""What a `split` divides: the elements, what each costs, and what each needs.

A selection that names one single module, that is `rest`, or that ends in `**` is opened: the modules in it are the
elements, and theirs, down to modules in which nothing more is called, and no deeper than a module that `nosplit` names.
All other selected modules are elements as they are. A parameter right in a module that was opened is an element of its
own; a module without parameters that is called several times (a shared dropout) is none, and is left to the data flow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppdsl.spec.claims import Claim, Claims, SplitOf
from ppdsl.spec.modules import ModuleTree, above
from ppdsl.spec.partition import PartKind, Path, Rest
from ppdsl.spec.select import Picked

__all__ = ["Element", "element_steps", "elements_of"]


@dataclass(frozen=True)
class Element:
    """One piece that is not divided further.

    Attributes:
        name: First name of the module, or of the parameter.
        is_parameter: Whether it is a parameter.
        steps: Its steps; those that other stages claim are not among them.
        parameters: First names of the parameters that its steps use, or that lie in it and are never used.
    """

    name: str
    is_parameter: bool
    steps: tuple[int, ...]
    parameters: tuple[str, ...]


def elements_of(
    number: int, claims: Claims, closed: frozenset[str], calls: Sequence[Claim | None], steps: Sequence[Claim | None]
) -> tuple[Element, ...]:
    """Return the elements of one split, in recorded order.

    Args:
        number: Of the split among the spec's.
        claims: All claims.
        closed: First names of the modules that `nosplit` names.
        calls: For each call the claim it belongs to.
        steps: For each step the claim it belongs to.
    """
    modules, parameters = _names(number, claims, closed)
    owner = SplitOf(number)
    of_call = _elements_of_calls(owner, set(modules), claims, calls)
    found: dict[str, list[int]] = {name: [] for name in (*modules, *parameters)}
    for step in claims.tree.outline.steps:
        claim = steps[step.index]
        if claim is None or claim.owner != owner:
            continue
        single = next((name for name in step.parameters if name in parameters), None)
        inner = None if step.call is None else of_call[step.call]
        name = inner or single
        if name is not None:
            found[name].append(step.index)
    order = _positions(modules, parameters, found, claims.tree)
    used = frozenset(name for step in claims.tree.outline.steps for name in step.parameters)
    return tuple(
        Element(name, name in parameters, tuple(found[name]), _parameters(name, found[name], used, claims))
        for name in sorted(found, key=lambda name: order[name])
    )


def element_steps(elements: Sequence[Element]) -> dict[int, int]:
    """Return for each step the position of its element."""
    return {step: at for at, element in enumerate(elements) for step in element.steps}


def _parameters(name: str, steps: Sequence[int], used: frozenset[str], claims: Claims) -> tuple[str, ...]:
    """Return the parameters that steps use, and those of the module that no step of the recording uses."""
    tree = claims.tree
    own = dict.fromkeys(p for step in steps for p in tree.outline.steps[step].parameters)
    if name not in tree:
        return tuple({**own, name: None})
    owner = claims.winner(name)
    idle = (p for p in tree.parameters_of(name) if p not in used and _belongs(p, owner, claims))
    return tuple({**own, **dict.fromkeys(idle)})


def _belongs(parameter: str, owner: Claim | None, claims: Claims) -> bool:
    """Return whether the module right around a parameter has the same owner."""
    claim = claims.winner(claims.tree.first.get(parameter.rpartition(".")[0], ""))
    return claim is not None and owner is not None and claim.owner == owner.owner


def _names(number: int, claims: Claims, closed: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the modules and parameters that are elements, in the order of the spec's selections."""
    owner = SplitOf(number)
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}

    def add(name: str, *, opened: bool) -> None:
        claim = claims.winner(name)
        if claim is None or claim.owner != owner:
            return
        below = list(dict.fromkeys(claims.tree.first[child] for child in claims.tree.children.get(name, ())))
        if not opened or name in closed or not any(claims.tree.is_called(child) for child in below):
            if not (opened and _is_glue(name, claims.tree)):
                modules.setdefault(name)
            return
        for parameter in claims.tree.own_parameters.get(name, ()):
            parameters.setdefault(parameter)
        for child in below:
            add(child, opened=True)

    for picked in claims.picked.get(owner, ()):
        for name in picked.modules:
            add(name, opened=_is_opened(picked))
        for name in picked.parameters:
            parameters.setdefault(name)
    # What lies in another element belongs to it.
    inside = [n for n in modules if not any(up in modules for up in list(above(n))[1:])]
    return inside, list(parameters)


def _is_glue(name: str, tree: ModuleTree) -> bool:
    """Return whether a module found by opening another is left to the data flow.

    A dropout that is called in two places, or never, has nothing to divide, and must not tie these places together.
    """
    return not tree.parameters_of(name) and len(tree.calls.get(name, ())) != 1


def _is_opened(picked: Picked) -> bool:
    selection = picked.selection
    deep = isinstance(selection, Path) and selection.parts[-1].kind is PartKind.DEEP
    return deep or isinstance(selection, Rest) or (len(picked.modules) == 1 and not picked.parameters)


def _elements_of_calls(
    owner: SplitOf, modules: set[str], claims: Claims, calls: Sequence[Claim | None]
) -> list[str | None]:
    """Return for each call the element it lies in: by its name, else by its caller."""
    found: list[str | None] = []
    for call in claims.tree.outline.calls:
        claim = calls[call.index]
        element = None
        if claim is not None and claim.owner == owner:
            first = claims.tree.first.get(call.module, call.module)
            names = claims.tree.names.get(first, (first,))
            ups = (claims.tree.first.get(up, up) for name in names for up in above(name))
            element = next((up for up in ups if up in modules), None)
            if element is None and call.parent is not None:
                element = found[call.parent]
        found.append(element)
    return found


def _positions(
    modules: list[str], parameters: list[str], steps: Mapping[str, Sequence[int]], tree: ModuleTree
) -> dict[str, tuple[float, int]]:
    """Return where each element stands: at its first step, or right behind its predecessor in the model."""
    in_model = {name: at for at, name in enumerate(tree.first)}
    order: dict[str, tuple[float, int]] = {}
    latest = -1.0
    for rank, name in enumerate(_in_model_order(modules, parameters, in_model)):
        first_call = tree.calls[name][0].start if tree.calls.get(name) else None
        if steps[name]:
            latest = steps[name][0]
        elif first_call is not None:
            latest = first_call - 0.5
        order[name] = (latest, rank)
    return order


def _in_model_order(modules: list[str], parameters: list[str], in_model: Mapping[str, int]) -> Iterator[str]:
    key = {name: (in_model[name], 1) for name in modules}
    key |= {name: (in_model.get(name.rpartition(".")[0], 0), 0) for name in parameters}
    yield from sorted(key, key=lambda name: key[name])
