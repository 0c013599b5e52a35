"""Who owns each call and each step of a recording, as the claims have it.

1. One call that is claimed itself belongs to that claim, a module that is claimed itself with all of its calls to that.
2. Else a call belongs with the call it is made from. A claim on a container that is never called itself (a
   `ModuleList`) comes before that when the container lies in what the caller's claim names.
3. A call made from no claimed call belongs to the nearest claim around its module's name.

So a module that is called from several stages (a rotary table, a shared embedding) follows its callers unless it is
claimed itself. A step belongs to the innermost claimed call around it; a step that uses a parameter that is claimed
itself belongs to that claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppdsl.graph.outline import ModuleCall, Step
from ppdsl.spec.claims import Claim, Claims
from ppdsl.spec.modules import above
from ppdsl.spec.select import Kind

__all__ = ["owners_of_calls", "owners_of_steps"]


def owners_of_calls(claims: Claims) -> tuple[Claim | None, ...]:
    """Return for each call of the recording the claim it belongs to."""
    found: list[Claim | None] = []
    for call in claims.tree.outline.calls:
        caller = None if call.parent is None else found[call.parent]
        found.append(_owner(call, caller, claims))
    return tuple(found)


def owners_of_steps(claims: Claims, calls: Sequence[Claim | None]) -> tuple[Claim | None, ...]:
    """Return for each step of the recording the claim it belongs to."""
    return tuple(_step(step, claims, calls) for step in claims.tree.outline.steps)


def _owner(call: ModuleCall, caller: Claim | None, claims: Claims) -> Claim | None:
    name = claims.tree.first.get(call.module, call.module)
    at = (name, call.number)
    single = claims.calls.get(at)
    if single:
        return single[0]
    own = claims.own(name)
    if own is not None and at in own.holes:
        own = None
    if own is not None and own.kind is not Kind.REST:
        return own
    if caller is not None and (name in caller.holes or at in caller.holes):
        caller = None
    named = own if own is not None else claims.around(name)
    if named is not None and at in named.holes:
        named = None
    if caller is None or named is None:
        return caller if named is None else named
    return named if _lies_in(named.target, caller.target, claims) else caller


def _lies_in(inner: str, outer: str, claims: Claims) -> bool:
    """Return whether one module lies in another, and is not that one."""
    first = claims.tree.first
    names = claims.tree.names.get(inner, (inner,))
    return inner != outer and any(first.get(up, up) == outer for name in names for up in above(name))


def _step(step: Step, claims: Claims, calls: Sequence[Claim | None]) -> Claim | None:
    owner = None if step.call is None else calls[step.call]
    for parameter in step.parameters:
        claimed = claims.parameters.get(parameter)
        if claimed and (owner is None or owner.target in above(parameter)):
            return max(claimed, key=lambda claim: claim.kind)
    return owner
