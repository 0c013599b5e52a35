"""A recording leaves the user's world as it was, also when forward raises."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppdsl.diagnostics import PpdslError
from ppdsl.recording.record import record_call
from tests.recording.harness import SEEDS, build, call_of, loss_of, mark, seed
from tests.recording.toys import TOYS
from tests.recording.toys.base import Toy


class Boom(Exception):
    """Raised in the middle of a forward."""


def everything(model: nn.Module, call: Any) -> dict[str, Any]:
    """What must not change, as comparable values with the tensors' contents."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        seen[f"module {name}"] = (id(module), type(module), module.training)
        for key, value in vars(module).items():
            for path, part in _parts(f"{name}.{key}", value):
                seen[path] = part
    for path, part in _parts("call", call):
        seen[path] = part
    seen["torch generator"] = torch.get_rng_state().tolist()
    seen["python generator"] = random.getstate()
    seen["numpy generator"] = [np.asarray(part).tolist() for part in np.random.get_state(legacy=True)]
    seen["modes"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
    seen["default dtype"] = torch.get_default_dtype()
    seen["patches"] = _patched_places(model)
    return seen


def _parts(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        if isinstance(value, nn.UninitializedParameter):
            yield path, id(value)
            return
        content = None if value.is_meta or value.layout is not torch.strided else value.detach().tolist()
        yield path, (id(value), type(value), value.requires_grad, value.grad_fn, value._version, repr(content))
        if value.is_leaf and value.layout is torch.strided:
            yield f"{path}.grad", None if value.grad is None else (id(value.grad), repr(value.grad.tolist()))
        yield f"{path} hooks", len(value._backward_hooks or ())
    elif isinstance(value, nn.Module):
        yield path, id(value)
    elif isinstance(value, dict) and depth < 4:
        yield path, (id(value), type(value), [str(key) for key in value])
        for key, part in value.items():
            yield from _parts(f"{path}[{key!r}]", part, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 4:
        yield path, (type(value), len(value))
        for index, part in enumerate(value):
            yield from _parts(f"{path}[{index}]", part, depth + 1)
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield path, value
    else:
        yield path, id(value)


def _patched_places(model: nn.Module) -> list[int]:
    """Identity of everything a recorder may be tempted to patch."""
    places: list[Any] = [
        torch.autograd.Function.__dict__.get("apply"),
        torch.autograd.Function.apply.__func__,
        torch.cond,
        torch.vmap,
        torch.func.grad,
        torch.from_numpy,
        torch.utils.checkpoint.checkpoint,
        nn.Module.__setattr__,
        torch._functorch.apis.vmap_impl,
        torch._functorch.eager_transforms.grad_impl,
    ]
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        places += [vars(kind).get("__call__"), vars(kind).get("forward"), vars(kind).get("__setattr__")]
    return sorted(id(place) for place in places)


def compare(before: dict[str, Any], after: dict[str, Any], *, lazy: bool) -> list[str]:
    """Name what changed; a lazy model may have grown by what its first call makes."""
    changed = [name for name, value in before.items() if name in after and after[name] != value]
    changed += [f"{name} is gone" for name in before if name not in after]
    if lazy:
        # Its own first call sets flags, tables and hooks that nobody can tell from state that must settle.
        kept = ("module", "torch", "python", "numpy", "modes", "patches", "call", "default")
        parts = ("_parameters", "_buffers", "_modules")
        return [c for c in changed if c.startswith(kept) or any(part in c for part in parts)]
    return changed + [f"{name} is new" for name in after if name not in before]


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_a_recording_changes_nothing(toy: Toy) -> None:
    model = build(toy)
    mark(model)
    args, kwargs = call_of(toy, SEEDS[0])
    for parameter in model.parameters():
        if not isinstance(parameter, nn.UninitializedParameter):
            parameter.grad = torch.full_like(parameter, 0.5)
    seed(99)
    before = everything(model, (args, kwargs))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record_call(model, args, kwargs, loss=loss_of)
    except PpdslError:
        pass
    assert not compare(before, everything(model, (args, kwargs)), lazy=toy.lazy)


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_a_forward_that_raises_midway_changes_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(toy)
    mark(model)
    args, kwargs = call_of(toy, SEEDS[0])
    seed(99)
    linear, calls = F.linear, iter(range(1000))

    def second_call_raises(*args: Any, **kwargs: Any) -> Tensor:
        if next(calls) == 1:
            raise Boom
        return linear(*args, **kwargs)

    def raising_loss(output: Any) -> Tensor:
        raise Boom

    before = everything(model, (args, kwargs))
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(F, "linear", second_call_raises)
        try:
            record_call(model, args, kwargs, loss=raising_loss)
        except (Boom, PpdslError):
            pass
        else:
            pytest.fail("the recording ended well")
    assert not compare(before, everything(model, (args, kwargs)), lazy=toy.lazy)


@pytest.mark.parametrize(
    "toy", [TOYS["two_blocks"], TOYS["cached_mask"], TOYS["batch_norm_in_both_stages"]], ids=lambda toy: toy.name
)
def test_the_plain_model_runs_as_before_after_a_recording(toy: Toy) -> None:
    args, kwargs = call_of(toy, SEEDS[0])
    expected = build(toy)(*args, **kwargs)
    model = build(toy)
    record_call(model, args, kwargs)
    assert torch.equal(model(*args, **kwargs), expected)


def test_a_compiled_module_stays_compiled() -> None:
    torch.compiler.reset()

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(nn.Linear(4, 4), backend="aot_eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    model, x = Compiled(), torch.zeros(2, 4)
    record_call(model, (x,))
    assert "Compiled" in type(model(x).grad_fn).__name__
