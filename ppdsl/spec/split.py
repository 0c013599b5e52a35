"""`split`: elements, what they cost, and their division into the stages of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from ppdsl.diagnostics import Diagnostic, Label, Severity
from ppdsl.spec.balance import whole_numbers
from ppdsl.spec.branches import Flow, branch_order, is_chain, range_rule
from ppdsl.spec.elements import Element, element_steps
from ppdsl.spec.fitting import Fitting, Limits
from ppdsl.spec.modules import ModuleTree, above, spell
from ppdsl.spec.partition import Balance, SplitDecl
from ppdsl.spec.select import selection_text
from ppdsl.units import counted, format_count, format_flops, format_seconds

__all__ = ["Division", "PartReason", "Pricing", "divide_split", "flow_between"]

_PRICE = 2.0
"""How many times larger the largest part may become to keep branches apart."""


@dataclass(frozen=True, slots=True)
class PartReason:
    """Why a part is as it is.

    Attributes:
        key: The stage.
        elements: What it consists of, in the order in which they run.
        cost: In the unit of the balance, weighted.
        share: Of the cost of the whole split, from 0 to 1.
        text: Cost and share in words.
    """

    key: int | str
    elements: tuple[str, ...]
    cost: float
    share: float
    text: str


@dataclass(frozen=True)
class Division:
    """A split that is divided: for each element its stage, and why."""

    elements: tuple[Element, ...]
    keys: tuple[int | str, ...]
    reasons: tuple[PartReason, ...]


@dataclass(frozen=True)
class Pricing:
    """What costs are worked out with.

    Attributes:
        tree: The model's modules.
        weights: By first name of a module the factor of what lies in it; the innermost counts.
        seconds: By any name of a module, for `by time` and `by file`.
    """

    tree: ModuleTree
    weights: Mapping[str, float]
    seconds: Mapping[str, float] | None

    def factor(self, name: str) -> float:
        """Return the weight of a module or parameter."""
        ups = (self.tree.first.get(up, up) for up in above(name))
        return next((self.weights[up] for up in ups if up in self.weights), 1.0)


def divide_split(
    split: SplitDecl, elements: Sequence[Element], pricing: Pricing, limits: Limits, findings: list[Diagnostic]
) -> Division | None:
    """Return the best division of a split, or None with a finding when there is none.

    Args:
        split: The declaration.
        elements: What is divided, in recorded order.
        pricing: What costs are worked out with.
        limits: Memory, and what it already holds.
        findings: Where errors and warnings go.
    """
    parts = len(split.keys)
    elements, idle = _with_hosts(elements)
    if not elements:
        return None
    if parts > len(elements):
        findings.append(_too_many(split, elements))
        return None
    costs = _costs(split, elements, pricing, findings)
    if costs is None:
        return None
    flow = flow_between(elements, pricing.tree)
    order = branch_order(flow)
    row = tuple(elements[at] for at in order)
    costs = [costs[at] for at in order]
    place = {element: at for at, element in enumerate(order)}
    flow = Flow(tuple(frozenset(place[need] for need in flow.needs[element]) for element in order))
    weights = [float(sum(pricing.tree.outline.steps[step].flops for step in element.steps)) for element in row]
    rule = range_rule(flow, weights, parts)
    fitting = Fitting(split, row, whole_numbers(costs), limits)
    ends = fitting.division(None)
    if ends is not None and rule is not None and not all(map(rule, (0, *ends), ends)):
        apart = fitting.division(rule)
        if apart is not None and _is_worth_it(apart, ends, costs, flow):
            ends = apart
        else:
            findings.append(_joined(split, elements))
    if ends is None:
        findings.append(fitting.explain())
        return None
    return _division(split, row, costs, ends, idle)


def _with_hosts(elements: Sequence[Element]) -> tuple[tuple[Element, ...], dict[str, list[Element]]]:
    """Return the elements that run, and for each of them those behind it that never do.

    What never runs has no place of its own, but its parameters have to be somewhere: beside the element before it.
    """
    live: list[Element] = []
    idle: dict[str, list[Element]] = {}
    first: list[Element] = []
    for element in elements:
        if element.steps:
            live.append(element)
        elif live:
            idle.setdefault(live[-1].name, []).append(element)
        else:
            first.append(element)
    if live and first:
        idle[live[0].name] = [*first, *idle.get(live[0].name, ())]
    hosts = (
        replace(element, parameters=tuple(dict.fromkeys(
            name for one in (element, *idle.get(element.name, ())) for name in one.parameters
        )))
        for element in live
    )  # fmt: skip
    return tuple(hosts), idle


def _is_worth_it(apart: Sequence[int], best: Sequence[int], costs: Sequence[float], flow: Flow) -> bool:
    """Return whether keeping branches apart lets two parts run beside each other, at a price that is not too high.

    Where all parts wait for each other anyway, the better balance is all there is to gain.
    """
    if _largest(apart, costs) > _PRICE * _largest(best, costs):
        return False
    return not is_chain(apart, flow)


def _largest(ends: Sequence[int], costs: Sequence[float]) -> float:
    """Return the cost of the largest part."""
    return max(sum(costs[start:end]) for start, end in zip((0, *ends), ends, strict=False))


def flow_between(elements: Sequence[Element], tree: ModuleTree) -> Flow:
    """Return which elements need which, steps of no element passed through; only needs of elements before count."""
    of_step = element_steps(elements)
    through: list[int] = []  # for each step the elements its value comes from, as bits
    needs = [0] * len(elements)
    for step in tree.outline.steps:
        sources = 0
        for need in step.needs:
            sources |= through[need]
        element = of_step.get(step.index)
        if element is None:
            through.append(sources)
        else:
            needs[element] |= sources & ((1 << element) - 1)
            through.append(1 << element)
    return Flow(tuple(frozenset(_bits(sources)) for sources in needs))


def _bits(number: int) -> list[int]:
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found


def _costs(
    split: SplitDecl, elements: Sequence[Element], pricing: Pricing, findings: list[Diagnostic]
) -> list[float] | None:
    steps = pricing.tree.outline.steps
    match split.balance:
        case Balance.COUNT:
            return [pricing.factor(element.name) for element in elements]
        case Balance.PARAMS:
            return _parameter_costs(elements, pricing)
        case Balance.FLOPS:
            return [sum(_step_flops(steps[s].flops, s, pricing) for s in element.steps) for element in elements]
        case Balance.TIME | Balance.FILE:
            return _second_costs(split, elements, pricing, findings)
        case _:
            assert_never(split.balance)


def _step_flops(flops: int, step: int, pricing: Pricing) -> float:
    call = pricing.tree.outline.steps[step].call
    name = "" if call is None else pricing.tree.outline.calls[call].module
    return flops * pricing.factor(name)


def _parameter_costs(elements: Sequence[Element], pricing: Pricing) -> list[float]:
    """Return numbers of parameters; one that several elements use counts in the first."""
    seen: set[str] = set()
    costs = []
    for element in elements:
        fresh = [name for name in element.parameters if name not in seen]
        seen.update(fresh)
        costs.append(sum(pricing.tree.parameters[name].count * pricing.factor(name) for name in fresh))
    return costs


def _second_costs(
    split: SplitDecl, elements: Sequence[Element], pricing: Pricing, findings: list[Diagnostic]
) -> list[float] | None:
    if pricing.seconds is None:
        text = f"`by {split.balance.value}` needs measured seconds, and there are none."
        findings.append(Diagnostic("no-costs", text, (Label(split.span),), "profile the model, or balance by flops"))
        return None
    found = [_seconds(element, pricing) for element in elements]
    missing = [element.name for element, cost in zip(elements, found, strict=True) if cost is None]
    if missing:
        more = f" and {counted(len(missing) - 1, 'other module')}" if len(missing) > 1 else ""
        text = f"The measured seconds say nothing of `{spell(missing[0])}`{more}."
        findings.append(Diagnostic("no-costs", text, (Label(split.span),), "profile this model again"))
        return None
    return [cost or 0.0 for cost in found]


def _seconds(element: Element, pricing: Pricing) -> float | None:
    """Return the seconds of an element: its own, else those of the modules in it; nothing runs in no time."""
    factor = pricing.factor(element.name)
    known = pricing.seconds or {}
    if element.is_parameter or not element.steps:
        return 0.0
    return _seconds_in(element.name, known, pricing.tree, factor)


def _seconds_in(name: str, known: Mapping[str, float], tree: ModuleTree, factor: float) -> float | None:
    own = next((known[alias] for alias in tree.names.get(name, (name,)) if alias in known), None)
    if own is not None:
        return own * factor
    inner = [_seconds_in(tree.first[child], known, tree, factor) for child in tree.children.get(name, ())]
    found = [cost for cost in inner if cost is not None]
    return sum(found) if found else None


def _division(
    split: SplitDecl,
    row: Sequence[Element],
    costs: Sequence[float],
    ends: Sequence[int],
    idle: Mapping[str, Sequence[Element]],
) -> Division:
    total = sum(costs)
    keys: list[int | str] = []
    reasons = []
    words = _words(split.balance)
    for key, start, end in zip(split.keys, (0, *ends), ends, strict=False):
        cost = sum(costs[start:end])
        share = cost / total if total else 1 / len(ends)
        names = tuple(element.name for element in row[start:end])
        reasons.append(PartReason(key, names, cost, share, f"{words(cost)}, {share:.1%} of the split"))
        keys += [key] * (end - start)
    pairs = list(zip(row, keys, strict=True))
    pairs += [(other, key) for element, key in pairs for other in idle.get(element.name, ())]
    return Division(tuple(element for element, _ in pairs), tuple(key for _, key in pairs), tuple(reasons))


def _words(balance: Balance) -> Callable[[float], str]:
    match balance:
        case Balance.COUNT:
            return lambda cost: counted(int(cost), "element") if float(cost).is_integer() else f"{cost:.3g} elements"
        case Balance.PARAMS:
            return lambda cost: f"{format_count(cost)} parameters"
        case Balance.FLOPS:
            return format_flops
        case Balance.TIME | Balance.FILE:
            return format_seconds
        case _:
            assert_never(balance)


def _too_many(split: SplitDecl, elements: Sequence[Element]) -> Diagnostic:
    text = ", ".join(selection_text(selection) for selection in split.selections)
    message = f"`{text}` has {counted(len(elements), 'element')}, too few for {len(split.keys)} parts."
    label = Label(split.span, f"{len(split.keys)} parts, {counted(len(elements), 'element')}")
    return Diagnostic("too-many-parts", message, (label,), f"split it into {len(elements)} or fewer")


def _joined(split: SplitDecl, elements: Sequence[Element]) -> Diagnostic:
    message = (
        f"{counted(len(split.keys), 'part')} of {counted(len(elements), 'element')} cannot keep branches apart: "
        "some that could run beside each other now run one after the other."
    )
    return Diagnostic("branches-joined", message, (Label(split.span),), "split into more parts", Severity.WARNING)
