"""I then W gives what a whole backward gives, however odd the stage."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ppdsl.runtime.stages.splitting import Postponed, Splitter
from tests.runtime.splitting_cases import HARD, Call, Hard, square


def start(model: nn.Module, x: torch.Tensor) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    made = model(x)
    values = [value for value in (made if isinstance(made, tuple) else (made,)) if value.requires_grad]
    return [get_gradient_edge(value) for value in values], [value.detach().cos() for value in values]


def whole(model: nn.Module, batch: list[torch.Tensor]) -> list[torch.Tensor | None]:
    found = []
    for x in batch:
        leaf = x.clone().requires_grad_(True)
        roots, gradients = start(model, leaf)
        torch.autograd.backward(roots, gradients)
        found.append(leaf.grad)
    return found


def split(model: nn.Module, batch: list[torch.Tensor], splitter: Splitter, *, late: bool) -> list[torch.Tensor | None]:
    """All weight gradients right after the input gradients, or all at the end."""
    found: list[torch.Tensor | None] = []
    left: list[Postponed] = []
    for x in batch:
        leaf = x.clone().requires_grad_(True)
        roots, gradients = start(model, leaf)
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        gradients_, postponed = splitter.input_gradients(roots, gradients, [leaf])
        found += gradients_
        if postponed is not None:
            if not postponed.cut or not postponed.cut.whole:
                assert_equal([p.grad for p in model.parameters()], before, exact=True)
            left.append(postponed)
        if not late and postponed is not None:
            splitter.weight_gradients(left.pop())
    for postponed in left:
        splitter.weight_gradients(postponed)
    return found


def assert_equal(actual: list[torch.Tensor | None], expected: list[torch.Tensor | None], *, exact: bool) -> None:
    for one, two in zip(actual, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            one, two = one.to_dense(), two.to_dense()
            if exact:
                assert torch.equal(one, two)
            else:
                torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def make(case: Hard) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = case.make().double()
    return model, [torch.randn(*case.shape, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end"])
@pytest.mark.parametrize("name", HARD)
def test_i_and_w_together_are_the_whole_backward(name: str, late: bool) -> None:
    case = HARD[name]
    model, batch = make(case)
    reference = copy.deepcopy(model)
    said: list[str] = []
    splitter = Splitter(said.extend)
    expected = whole(reference, batch)
    found = split(model, batch, splitter, late=late)
    assert_equal(found, expected, exact=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert_equal(gradients, [parameter.grad for parameter in reference.parameters()], exact=case.exact)
    assert tuple(said) == case.whole


def test_a_stage_without_inputs_does_all_in_w() -> None:
    model, batch = make(HARD["deep"])
    reference = copy.deepcopy(model)
    whole(reference, batch)
    splitter = Splitter(print)
    for x in batch:
        roots, gradients = start(model, x)
        found, postponed = splitter.input_gradients(roots, gradients, [])
        assert found == []
        assert postponed is not None
        splitter.weight_gradients(postponed)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()], exact=True)


def test_a_graph_that_changes_its_shape_is_cut_anew() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        scale = (m.w, x, m.b)[m.calls % 3]
        h = torch.tanh(m.a(x)) * scale
        return m.a(h) if m.calls % 2 else h + m.c(x if m.calls % 4 else h)

    torch.manual_seed(0)
    model = Call(run, a=nn.Linear(4, 4), c=nn.Linear(4, 4), w=square(3, 4), b=square(4), calls=0).double()
    reference = copy.deepcopy(model)
    batch = [torch.randn(3, 4, dtype=torch.float64) for _ in range(24)]
    splitter = Splitter(print)
    assert_equal(split(model, batch, splitter, late=True), whole(reference, batch), exact=True)
    gradients = [parameter.grad for parameter in reference.parameters()]
    assert_equal([parameter.grad for parameter in model.parameters()], gradients, exact=True)


def test_weights_that_become_one_weight_are_seen() -> None:
    torch.manual_seed(0)
    model = Call(lambda m, x: m.pair[0](x) + m.pair[1](x), one=nn.Linear(4, 4), two=nn.Linear(4, 4)).double()
    model.pair = [model.one, model.two]
    reference = Call(lambda m, x: m.pair[0](x) + m.pair[1](x), one=nn.Linear(4, 4), two=nn.Linear(4, 4)).double()
    reference.load_state_dict(model.state_dict())
    reference.pair = [reference.one, reference.two]
    splitter = Splitter(print)
    for _ in range(2):
        batch = [torch.randn(3, 4, dtype=torch.float64)]
        assert_equal(split(model, batch, splitter, late=False), whole(reference, batch), exact=True)
        model.pair, reference.pair = [model.one] * 2, [reference.one] * 2
    expected = [parameter.grad for parameter in reference.parameters()]
    assert_equal([parameter.grad for parameter in model.parameters()], expected, exact=True)


class Log:
    """What hooks were called with."""

    def __init__(self, model: nn.Module) -> None:
        self.lines: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(self.note(f"tensor {name}"))
            parameter.register_post_accumulate_grad_hook(self.note(f"after {name}"))
        for name, module in model.named_modules():
            if name and isinstance(module, nn.Linear):
                module.register_full_backward_pre_hook(self.note(f"before {name}"))
                module.register_full_backward_hook(self.note(f"module {name}"))

    def note(self, text: str) -> Any:
        def hook(*_: object) -> None:
            self.lines.append(text)

        return hook


@pytest.mark.parametrize("name", ["deep", "weight used twice through linear", "custom", "checkpoint"])
def test_every_hook_runs_once_for_a_micro_batch_and_as_often_as_in_a_whole_backward(name: str) -> None:
    model, batch = make(HARD[name])
    reference = copy.deepcopy(model)
    log, expected = Log(model), Log(reference)
    whole(reference, batch)
    split(model, batch, Splitter(lambda names: None), late=True)
    assert sorted(log.lines) == sorted(expected.lines)
    inner = [[line for line in lines if line[:6] in ("before", "module")] for lines in (log.lines, expected.lines)]
    assert inner[0] == inner[1]
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()], exact=True)


def test_a_hook_that_changes_a_weight_gradient_changes_the_sum_once() -> None:
    model, batch = make(HARD["weight used twice on one path"])
    reference = copy.deepcopy(model)
    for one in (model, reference):
        one.w.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    whole(reference, batch)
    split(model, batch, Splitter(print), late=True)
    assert torch.equal(model.w.grad, reference.w.grad)


def test_an_error_in_a_hook_reaches_the_caller_and_the_next_micro_batch_is_fine() -> None:
    model, batch = make(HARD["linear"])

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("bad luck")

    splitter = Splitter(print)
    handle = model.bias.register_hook(fail)
    with pytest.raises(ValueError, match="bad luck"):
        split(model, batch[:1], splitter, late=False)
    handle.remove()
    model.zero_grad()
    reference = copy.deepcopy(model)
    whole(reference, batch)
    split(model, batch, splitter, late=False)
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_a_weight_changed_between_i_and_w_is_an_error_not_a_wrong_number() -> None:
    model, batch = make(HARD["residual"])
    leaf = batch[0].clone().requires_grad_(True)
    splitter = Splitter(print)
    value = torch.sin(leaf)
    made = model.a(value)
    _, postponed = splitter.input_gradients([get_gradient_edge(made)], [torch.ones(3, 4).double()], [leaf])
    value.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        splitter.weight_gradients(postponed)


class Count(torch.autograd.Function):
    """Counts how often gradients are computed."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Count.calls += 1
        return gradient


def test_w_does_not_run_what_lies_between_the_weights_again() -> None:
    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = Count.apply(m.a(x))
        return x

    Count.calls = 0
    model = Call(run, a=nn.Linear(4, 4)).double()
    split(model, [torch.randn(3, 4, dtype=torch.float64)], Splitter(print), late=True)
    assert Count.calls == 3


def test_nothing_is_left_after_w_and_less_than_before_after_i() -> None:
    seen: list[weakref.ref[Any]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(x.untyped_storage()))
        return x

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = keep(torch.sin(m.a(keep(torch.cos(x)))))
        return keep(keep(h.exp()).exp()).log_softmax(1)

    model = Call(run, a=nn.Linear(4, 4)).double()
    splitter = Splitter(print)
    alive = []
    for _ in range(3):
        seen.clear()
        leaf = torch.randn(3, 4, dtype=torch.float64).requires_grad_(True)
        roots, gradients = start(model, leaf)
        counts = [sum(ref() is not None for ref in seen)]
        _, postponed = splitter.input_gradients(roots, gradients, [leaf])
        roots.clear()
        counts.append(sum(ref() is not None for ref in seen))
        splitter.weight_gradients(postponed)
        counts.append(sum(ref() is not None for ref in seen))
        alive.append(counts)
    # After I: what the linear needs. Above it, nothing. No collector has to come by.
    gc.collect()
    assert alive == [[3, 1, 0]] * 3
