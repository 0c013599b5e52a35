"""Collectives between XLA devices equal the same sums and joins in one process, values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch

from ppdsl.diagnostics import CallError, RunError
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla import collectives as c
from ppdsl.runtime.xla.collectives import launching
from tests.docs.pages import blocks

pytestmark = pytest.mark.xla

Tensors = Sequence[torch.Tensor]
FOUR = range(4)
GROUPINGS = [None, [[3, 1], [0, 2]], [[0, 1, 2], [3]]]


@pytest.fixture(autouse=True, scope="module")
def _started() -> None:
    """Load torch_xla, which teaches torch the device `xla`."""
    adapter.device_count()


@dataclass
class Case:
    """A collective and its definition on the host.

    Attributes:
        collective: Takes tensors on devices.
        definition: Takes the same tensors on the host.
        places: Where the tensors lie.
        shape: Of each of them.
    """

    collective: Callable[[Tensors], Tensors]
    definition: Callable[[Tensors], Tensors]
    places: Sequence[int] = FOUR
    shape: tuple[int, ...] = (12, 3)


def in_groups(step: Callable[[Tensors], Tensors], groups: Sequence[Sequence[int]] | None, places: Sequence[int]):
    """Let `step` define what a group does, and put its results in the order of the tensors."""

    def definition(tensors: Tensors) -> Tensors:
        by_place = dict(zip(places, tensors, strict=True))
        made: dict[int, torch.Tensor] = {}
        for group in [places] if groups is None else groups:
            made.update(zip(group, step([by_place[place] for place in group]), strict=True))
        return [made[place] for place in places]

    return definition


def total(tensors: Tensors) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def exchanged(tensors: Tensors, split: int, join: int) -> Tensors:
    pieces = [tensor.chunk(len(tensors), split) for tensor in tensors]
    return [torch.cat(column, join) for column in zip(*pieces, strict=True)]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for groups in GROUPINGS:
        for name, step, call in (
            ("all_reduce", lambda t: [total(t)] * len(t), c.all_reduce),
            ("all_gather", lambda t: [torch.cat(list(t))] * len(t), c.all_gather),
            ("reduce_scatter", lambda t: total(t).chunk(len(t)), c.reduce_scatter),
            ("all_to_all", lambda t: exchanged(t, 0, 1), lambda t, groups: c.all_to_all(t, 0, 1, groups)),
        ):
            collective = lambda t, call=call, groups=groups: call(t, groups=groups)  # noqa: E731
            found[f"{name} {groups}"] = Case(collective, in_groups(step, groups, FOUR))
    for places in ([2], [3, 1], [2, 0, 3]):
        found[f"all_reduce of {places}"] = Case(c.all_reduce, lambda t: [total(t)] * len(t), places)
        found[f"all_gather of {places}"] = Case(
            lambda t: c.all_gather(t, dim=-1), lambda t: [torch.cat(list(t), 1)] * len(t), places
        )
        found[f"reduce_scatter of {places}"] = Case(c.reduce_scatter, lambda t: total(t).chunk(len(t)), places)
        found[f"all_to_all of {places}"] = Case(c.all_to_all, lambda t: exchanged(t, 0, 0), places)
        found[f"broadcast to {places}"] = Case(
            lambda t, places=places: c.broadcast(t[0], places), lambda t, places=places: [t[0]] * len(places), [0]
        )
        found[f"reduce of {places}"] = Case(
            lambda t, places=places: [c.reduce(t, places[0])], lambda t: [total(t)], places
        )
    found["mean"] = Case(
        lambda t: c.all_reduce(t, "mean", [[0, 1, 3], [2]]),
        in_groups(lambda t: [total(t) / len(t)] * len(t), [[0, 1, 3], [2]], FOUR),
    )
    found["maximum"] = Case(lambda t: c.all_reduce(t, "max"), lambda t: [torch.stack(list(t)).amax(0)] * len(t))
    found["minimum to one"] = Case(lambda t: [c.reduce(t, 3, "min")], lambda t: [torch.stack(list(t)).amin(0)], [3, 0])
    for transport in ("permute", "all_reduce"):
        found[f"send by {transport}"] = Case(
            lambda t, how=transport: [c.recv(c.send(t[0], 2, how), 2)], lambda t: t, [1]
        )
        found[f"send to itself by {transport}"] = Case(
            lambda t, how=transport: [c.recv(c.send(t[0], 1, how), 1)], lambda t: t, [1]
        )
        for pairs in ([(0, 1), (1, 2), (2, 3)], [(3, 0), (0, 3)], [(1, 1), (2, 0)]):
            found[f"permute {pairs} by {transport}"] = Case(
                lambda t, pairs=pairs, how=transport: c.collective_permute(t, pairs, how),
                lambda t: t,
                [source for source, _ in pairs],
            )
        found[f"gather by {transport}"] = Case(lambda t, how=transport: c.gather(t, 1, how), lambda t: t, [3, 1, 0])
        found[f"scatter by {transport}"] = Case(
            lambda t, how=transport: c.scatter([t[0], t[0] * 2, t[0] * 3], [3, 2, 0], how),
            lambda t: [t[0], t[0] * 2, t[0] * 3],
            [2],
        )
    return found


CASES = cases()

# One of each kind, without those that compute what other element types cannot.
SMALL = [
    *(f"{name} None" for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    *("all_gather of [2, 0, 3]", "reduce_scatter of [2, 0, 3]", "all_to_all of [2, 0, 3]"),
    *("broadcast to [2, 0, 3]", "reduce of [2, 0, 3]", "maximum", "minimum to one"),
    *(f"{name} by {transport}" for name in ("send", "gather") for transport in ("permute", "all_reduce")),
    "permute [(0, 1), (1, 2), (2, 3)] by permute",
]


def inputs(
    case: Case, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a case's tensors on the host and the same on their devices."""
    generator = torch.Generator().manual_seed(seed)
    host = [torch.randint(-8, 9, case.shape, generator=generator).to(dtype) for _ in case.places]
    return host, [tensor.to(f"xla:{place}") for tensor, place in zip(host, case.places, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(name: str) -> None:
    """Covers UR-139, UR-140."""
    case = CASES[name]
    host, remote = inputs(case)
    for tensor in chain(host, remote):
        tensor.requires_grad_()
    expected, made = case.definition(host), case.collective(remote)
    weights = [torch.arange(1.0, tensor.numel() + 1).reshape(tensor.shape) + n for n, tensor in enumerate(expected)]
    assert len(expected) == len(made)
    for right, result in zip(expected, made, strict=True):
        assert torch.equal(result.detach().cpu(), right.detach())
    sum((right.square() * weight).sum() for right, weight in zip(expected, weights, strict=True)).backward()
    losses = [(result.square() * weight.to(result.device)).sum() for result, weight in zip(made, weights, strict=True)]
    sum(loss.cpu() for loss in losses).backward()
    for here, there in zip(host, remote, strict=True):
        assert there.grad is not None
        assert there.grad.device == there.device
        torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_every_element_type_is_moved_as_it_is(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    host, remote = inputs(case, dtype)
    for right, result in zip(case.definition(host), case.collective(remote), strict=True):
        assert result.dtype == right.dtype
        assert torch.equal(result.cpu(), right)


def test_second_derivatives_go_through_a_collective() -> None:
    host = [torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)]
    remote = [tensor.detach().to(f"xla:{place}").requires_grad_() for place, tensor in enumerate(host)]
    expected = torch.autograd.grad(total(host).pow(3).sum(), host, create_graph=True)
    made = torch.autograd.grad(c.all_reduce(remote)[0].pow(3).sum(), remote, create_graph=True)
    second = torch.autograd.grad(sum(expected).sum(), host[0])
    assert torch.equal(torch.autograd.grad(c.reduce(made, 0).sum(), remote[0])[0].cpu(), second[0])


def test_those_that_share_a_maximum_share_its_gradient() -> None:
    remote = [
        torch.tensor([1.0, value], device=f"xla:{place}", requires_grad=True) for place, value in enumerate([2, 3, 3])
    ]
    c.all_reduce(remote, "max")[1].sum().backward()
    third = torch.tensor(1 / 3).item()
    assert [tensor.grad.cpu().tolist() for tensor in remote] == [[third, 0], [third, 0.5], [third, 0.5]]


def test_what_a_stage_still_computes_is_no_part_of_the_collective() -> None:
    """The stages of a pipeline run different programs; the collective between them has to be one."""
    weights = [torch.full((4, 4), 0.1 + place / 8, device=f"xla:{place}", requires_grad=True) for place in FOUR]
    x = torch.ones(2, 4, device="xla:0")
    for place in FOUR:
        x = x @ weights[place] if place % 2 else (x @ weights[place]).tanh()
        if place < 3:
            x = c.recv(c.send(x, place + 1), place + 1)
    x.sum().backward()
    plain = [torch.full((4, 4), 0.1 + place / 8, requires_grad=True) for place in FOUR]
    y = torch.ones(2, 4)
    for place in FOUR:
        y = y @ plain[place] if place % 2 else (y @ plain[place]).tanh()
    y.sum().backward()
    for there, here in zip(weights, plain, strict=True):
        torch.testing.assert_close(there.grad.cpu(), here.grad, rtol=1e-5, atol=1e-7)


def test_a_transfer_is_compiled_once_and_copies_nothing_to_the_host() -> None:
    x = torch.ones(5, 2, device="xla:0")
    c.send(x, 1)
    adapter.wait()
    before = adapter.counters()
    for _ in range(3):
        c.send(x, 1)
    counted = adapter.counters().since(before)
    assert (counted.compilations, counted.downloads, counted.uploads) == (0, 0, 0)
    assert counted.launches == 3 * (4 + 3), "one program on each device, and zeros on the three that hold nothing"


def test_the_program_of_a_transfer_has_exactly_the_planned_pairs_and_is_the_same_everywhere() -> None:
    """Covers UR-140."""
    pairs = [(0, 1), (1, 2)]
    texts = launching.program_texts(
        {0: torch.ones(2, 3, device="xla:0"), 1: torch.zeros(2, 3, device="xla:1")},
        lambda tensor: [adapter.pending_permute(tensor, pairs)],
    )
    assert len(texts) == 4
    assert len(set(texts)) == 1
    assert texts[0].count("collective-permute(") == 1
    assert "source_target_pairs={{0,1},{1,2}}" in texts[0]


@pytest.mark.parametrize("value", [0.0, 1.0, 2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("transport", ["permute", "all_reduce"])
def test_numbers_that_the_compiler_treats_specially_arrive(value: float, transport: str) -> None:
    for shape in ((), (1,), (2, 1)):
        sent = torch.full(shape, value)
        got = c.recv(c.send(sent.to("xla:3"), "xla:0", transport), torch.device("xla:0")).cpu()
        assert torch.equal(got.nan_to_num(7.5), sent.nan_to_num(7.5))


def test_a_view_and_a_transposed_tensor_arrive() -> None:
    x = torch.arange(12.0).reshape(3, 4).to("xla:1")
    for view in (x.t(), x[1:, ::2], x[0].expand(2, 4)):
        assert torch.equal(c.recv(c.send(view, 2), 2).cpu(), view.cpu())


def test_two_threads_at_once_never_make_devices_wait_for_each_other() -> None:
    """Autograd runs the backward of several devices in several threads."""

    def work(first: int) -> float:
        x = torch.full((3,), float(first), device=f"xla:{first}")
        for step in range(20):
            x = c.recv(c.send(x, (first + step + 1) % 4), (first + step + 1) % 4)
        return x.sum().item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [1, 2])) == [3.0, 6.0]


def test_the_example_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "xla-collectives.md"
    names: dict[str, object] = {}
    (example,) = [block.text for block in blocks(page) if block.language == "python"]
    exec(compile(example, str(page), "exec"), names)
    assert names["a"].grad.cpu().tolist() == [[1.0, 1.0]] * 4


# ---------------------------------------------------------------- refusals


def on(place: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (4,), dtype=dtype, device=f"xla:{place}")


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a replica left out": (
        lambda: c.all_reduce([on(0), on(1)], groups=[[0, 1, 2]]),
        "xla:2 is in a group of all_reduce, and has no tensor",
    ),
    "a tensor in no group": (
        lambda: c.all_gather([on(0), on(1)], groups=[[0]]),
        "all_gather got a tensor on xla:1, which is in none of its groups",
    ),
    "a source without a tensor": (
        lambda: c.collective_permute([on(0)], [(0, 1), (1, 2)]),
        "got tensors on xla:0, and its pairs begin on xla:0, xla:1",
    ),
    "a target without a tensor": (
        lambda: c.reduce([on(0), on(1)], 2),
        "xla:2 is to get the result of reduce, and has no tensor",
    ),
    "fewer tensors than targets": (lambda: c.scatter([on(0)], [1, 2]), "scatter got 1 tensors for 2 devices"),
    "a device in two groups": (
        lambda: c.all_reduce([on(0), on(1)], groups=[[0, 1], [1]]),
        "xla:1 is in two groups of all_reduce",
    ),
    "two tensors on one device": (lambda: c.all_reduce([on(0), on(0)]), "all_reduce got 2 tensors on xla:0"),
    "two sources": (lambda: c.collective_permute([on(0), on(1)], [(0, 2), (1, 2)]), "xla:2 is the target of 2 pairs"),
    "a target twice": (lambda: c.broadcast(on(0), [1, 1]), "broadcast was given a target twice"),
    "other shapes": (
        lambda: c.all_reduce([on(0), on(1, 5)]),
        "Tensor 1 of all_reduce is float32[5] on xla:1, and tensor 0 is float32[4] on xla:0",
    ),
    "other element types": (
        lambda: c.gather([on(0), on(1, dtype=torch.int64)], 0),
        "Tensor 1 of gather is int64[4] on xla:1",
    ),
    "a tensor on the host": (lambda: c.send(torch.ones(2), 1), "Tensor 0 of send is on cpu, not on an XLA device"),
    "no tensors": (lambda: c.all_reduce([]), "all_reduce got no tensors"),
    "an empty tensor": (
        lambda: c.send(torch.ones(0, 2, device="xla:0"), 1),
        "send got float32[0, 2], with no elements",
    ),
    "complex numbers": (lambda: c.send(on(0, dtype=torch.complex64), 1), "with complex elements"),
    "no such device": (lambda: c.send(on(0), 4), "There is no device 4 among the 4 XLA devices"),
    "a device of another kind": (lambda: c.send(on(0), "cpu"), "There is no device cpu among the 4 XLA devices"),
    "another receiver": (lambda: c.recv(c.send(on(0), 1), 2), "xla:2 waits for a tensor that xla:0 sent to xla:1"),
    "uneven pieces": (
        lambda: c.reduce_scatter([on(0, 3), on(1, 3)]),
        "reduce_scatter cannot cut float32[3] along dimension 0 into 2 equal pieces",
    ),
    "no such dimension": (lambda: c.all_gather([on(0), on(1)], dim=1), "was given dimension 1, and its tensors have 1"),
    "an unknown reduction": (lambda: c.all_reduce([on(0)], "median"), "all_reduce has no op 'median'"),
    "an unknown transport": (lambda: c.send(on(0), 1, "host"), "send has no transport 'host'"),
    "sources on two devices": (lambda: c.scatter([on(0), on(1)], [1, 2]), "scatter got tensors on xla:0 and on xla:1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_launched(name: str) -> None:
    call, words = REFUSED[name]
    c.self_test()
    for place in FOUR:
        adapter.launch(adapter.device_of(place))
    before = adapter.counters().launches
    with pytest.raises(CallError) as caught:
        call()
    assert words in caught.value.diagnostics[0].message
    if name != "another receiver":
        assert adapter.counters().launches == before


def test_replicas_whose_programs_would_differ_are_refused_and_the_next_collective_works() -> None:
    """XLA would wait for ever and then end the process."""
    calls = iter(FOUR)

    def program(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [adapter.pending_permute(tensor.tanh() if next(calls) == 2 else tensor, [(0, 1)])]

    with pytest.raises(RunError, match=r"another program on xla:2 than on xla:0; nothing was launched"):
        launching.launch_everywhere({0: on(0)}, program)
    assert c.recv(c.send(on(0), 1), 1).cpu().tolist() == [1.0] * 4


def test_a_program_that_fails_leaves_nothing_pending() -> None:
    def program(tensor: torch.Tensor) -> list[torch.Tensor]:
        adapter.pending_permute(tensor, [(0, 1)])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launching.launch_everywhere({0: on(0)}, program)
    assert c.recv(c.send(on(0), 1), 1).cpu().tolist() == [1.0] * 4
