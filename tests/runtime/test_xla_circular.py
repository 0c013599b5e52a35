"""Equal stages as one compiled program: the numbers of the plain model, one launch a step, and what is refused.

SPMD mode holds for the whole process, so these tests have one of their own.
"""

from __future__ import annotations

import copy
import linecache
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppdsl as pp
from ppdsl.diagnostics import CallError, GraphError, RunError
from ppdsl.runtime.xla import adapter
from tests.docs.pages import blocks
from tests.runtime.circular_worker import MICROBATCHES, ROWS, chain
from tests.runtime.test_spmd_stages import WIDTH, Block, Chain

pytestmark = pytest.mark.xla


class Attention(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Normed(nn.Module):
    """Divides by a norm: its gradient at zero is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x / x.norm(dim=-1, keepdim=True))


def plain(model: nn.Module, batch: torch.Tensor, target: torch.Tensor, pieces: int) -> torch.Tensor:
    pairs = zip(batch.chunk(pieces), target.chunk(pieces), strict=True)
    loss = torch.stack([F.mse_loss(model(x), y) for x, y in pairs]).mean()
    loss.backward()
    return loss.detach()


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    scale = float(right.abs().max()) or 1.0
    assert found.shape == right.shape
    assert float((found - right).abs().max()) <= 1e-5 * scale + 1e-9


MODELS = {
    "layers": (lambda: Chain(*(Block() for _ in range(4))), (2, WIDTH), 6),
    "two stages on a device": (lambda: Chain(*(Block() for _ in range(8))), (2, WIDTH), 2),
    "two blocks in a stage": (lambda: Chain(*(nn.Sequential(Block(), Block()) for _ in range(4))), (1, WIDTH), 2),
    "attention": (lambda: Chain(*(Attention() for _ in range(4))), (2, 3, 8), 2),
    "one micro-batch": (lambda: Chain(*(Block() for _ in range(4))), (3, WIDTH), 1),
    "no gradient at zero": (lambda: Chain(*(Normed() for _ in range(4))), (2, WIDTH), 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_outputs_are_those_of_the_plain_model(name: str) -> None:
    torch.manual_seed(0)
    make, shape, pieces = MODELS[name]
    model = make()
    reference = copy.deepcopy(model)
    batch, target = (torch.randn(pieces * shape[0], *shape[1:]) for _ in range(2))
    pipe = pp.xla.circular(model, (batch[: shape[0]],), loss=F.mse_loss, microbatches=pieces)
    result = pipe.step(batch, target)
    right = plain(reference, batch, target, pieces)
    close(result.loss, right)
    assert len(result.losses) == pieces
    gradients = pipe.gradients()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        close(gradients[key], gradient)
    close(pipe.evaluate(batch), reference(batch).detach())
    assert all(parameter.grad is None for parameter in model.parameters()), "the model itself is not touched"


def test_a_step_is_that_of_the_same_stages_each_on_a_device_of_its_own(tmp_path: Path) -> None:
    # In another process: this one is in SPMD mode, where there is one device.
    environment = {key: value for key, value in os.environ.items() if key != "XLA_USE_SPMD"}
    worker = [sys.executable, "-m", "tests.runtime.circular_worker", str(tmp_path / "found")]
    subprocess.run(worker, env=environment, check=True, capture_output=True, timeout=300)
    found = torch.load(tmp_path / "found")
    model, batch, target = chain()
    pipe = pp.xla.circular(model, (batch[:ROWS],), loss=F.mse_loss, microbatches=MICROBATCHES)
    outputs = pipe.evaluate(batch)
    result = pipe.step(batch, target)
    gradients = pipe.gradients()
    assert found.keys() == {"1f1b", "gpipe"}
    for other in found.values():
        close(result.loss, other["loss"])
        close(outputs, other["outputs"])
        assert gradients.keys() == other["gradients"].keys() == dict(model.named_parameters()).keys()
        for name, gradient in gradients.items():
            close(gradient, other["gradients"][name])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_one_launch_a_step_without_compiling_anew_and_ends_as_the_plain_model(
    kind: type[torch.optim.Optimizer],
) -> None:
    torch.manual_seed(1)
    model = Chain(*(Block() for _ in range(4)))
    reference = copy.deepcopy(model)
    pipe = pp.xla.circular(model, (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=2)
    ours, theirs = kind(pipe.parameters(), lr=0.05), kind(reference.parameters(), lr=0.05)
    for number in range(5):
        batch, target = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        before = adapter.counters()
        result = pipe.step(batch, target, optimizer=ours)
        counted = adapter.counters().since(before)
        assert counted.launches == 1
        assert number < 2 or counted.compilations == 0
        theirs.zero_grad()
        close(result.loss, plain(reference, batch, target, 2))
        theirs.step()
    expected = reference.state_dict()
    state = pipe.state_dict()
    assert list(state) == list(expected)
    assert model.load_state_dict(state)
    for name, value in expected.items():
        # Adam divides by the root of tiny squares.
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    pipe.write_back()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_gradients_are_added_until_they_are_cleared() -> None:
    torch.manual_seed(2)
    model = Chain(*(Block() for _ in range(4)))
    batch, target = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    pipe = pp.xla.circular(model, (batch[:2],), loss=F.mse_loss, microbatches=2)
    pipe.step(batch, target)
    once = pipe.gradients()
    pipe.step(batch, target)
    for name, gradient in pipe.gradients().items():
        close(gradient, 2 * once[name])


def test_each_device_holds_its_own_stages_alone() -> None:
    import torch_xla

    pipe = pp.xla.circular(
        Chain(*(Block() for _ in range(4))), (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=2
    )
    pipe.step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    for parameter in pipe.parameters():
        for tensor in (parameter, parameter.grad):
            spec = torch_xla._XLAC._get_xla_sharding_spec(tensor)
            assert spec == f"{{devices=[{','.join(['4'] + ['1'] * (tensor.ndim - 1))}]0,1,2,3}}"


def test_the_compiled_step_sends_slices_to_neighbours_and_gathers_neither_weights_nor_state(tmp_path: Path) -> None:
    options = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_USE_SPMD"}
    worker = [sys.executable, "-m", "tests.runtime.circular_worker"]
    subprocess.run(worker, env={**environment, "XLA_FLAGS": options}, check=True, capture_output=True, timeout=200)
    (program,) = [file.read_text() for file in tmp_path.glob("*after_optimizations.txt")]
    used = {kind: program.count(f" {kind}(") for kind in ("all-gather", "all-to-all", "all-reduce")}
    assert used == {"all-gather": 0, "all-to-all": 0, "all-reduce": 3}, "the last stage's output, once a micro-batch"
    assert program.count(" collective-permute(") >= 2 * 5, "forward and back, between six ticks"


def test_stages_that_do_not_go_evenly_over_the_devices_are_refused() -> None:
    with pytest.raises(GraphError, match="6 stages do not go evenly over 4 XLA devices"):
        pp.xla.circular(Chain(*(Block() for _ in range(6))), (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=2)


def test_a_batch_of_another_shape_is_refused() -> None:
    pipe = pp.xla.circular(
        Chain(*(Block() for _ in range(4))), (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=2
    )
    with pytest.raises(CallError, match=r"The batch is float32\[5, 6\], and a step takes float32\[4, 6\]"):
        pipe.step(torch.randn(5, WIDTH), torch.randn(5, WIDTH))
    with pytest.raises(CallError, match=r"Target 0 has shape \[5, 6\], which does not make 2 equal pieces"):
        pipe.step(torch.randn(4, WIDTH), torch.randn(5, WIDTH))
    with pytest.raises(CallError, match="microbatches is 0"):
        pp.xla.circular(Chain(), (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=0)


def test_collectives_between_devices_are_refused_in_this_process() -> None:
    with pytest.raises(RunError, match="The process is in SPMD mode"):
        pp.xla.collectives.self_test()


def test_a_process_that_used_its_devices_one_by_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "start_spmd", lambda: False)
    with pytest.raises(CallError, match="cannot go into SPMD mode any more"):
        pp.xla.circular(Chain(*(Block() for _ in range(4))), (torch.randn(2, WIDTH),), loss=F.mse_loss, microbatches=2)


def test_the_example_of_the_guide_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "circular.md"
    # A class that is recorded needs its source in a file.
    (example,) = [block.text for block in blocks(page) if block.language == "python"]
    names: dict[str, object] = {"__name__": "guide"}
    linecache.cache["guide.py"] = (len(example), None, example.splitlines(keepends=True), "guide.py")
    exec(compile(example, "guide.py", "exec"), names)
    assert names["pipe"].state_dict().keys() == names["model"].state_dict().keys()
