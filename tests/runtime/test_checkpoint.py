from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.runtime.checkpoints import checkpoint, saving
from tests.runtime.launch import ENVIRONMENT

WIDTH = 4


class Deep(nn.Module):
    """Any number of blocks in any number of stages; the first and last weights are tied."""

    def __init__(self, blocks: int = 5, stages: int = 2, late: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.blocks[-1].weight = self.blocks[0].weight
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.cuts = [i * blocks // stages for i in range(stages)]
        self.spared = True

    def get_extra_state(self) -> Any:
        return {"spared": self.spared}

    def set_extra_state(self, state: Any) -> None:
        self.restored = state

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            with pp.stage(sum(i >= cut for cut in self.cuts) - 1):
                x = torch.tanh(block(x)) + x
        x = self.drop(self.norm(x))
        return x if self.spared else self.spare(x)


def deep(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return Deep(**options).double()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, WIDTH, generator=made).double(), torch.randn(8, WIDTH, generator=made).double()


def piped(model: nn.Module, **options: Any) -> pp.Pipeline:
    x, y = batch()
    return pp.pipeline(model, (x[:4],), targets=y[:4], loss=functional.mse_loss, microbatches=2, **options)


def adamw(target: Any) -> torch.optim.Optimizer:
    named = list(target.named_parameters())
    heavy = [p for name, p in named if not name.endswith("bias")]
    light = [p for name, p in named if name.endswith("bias")]
    groups = [{"params": heavy, "weight_decay": 0.1}, {"params": light, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)


def momentum(target: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(target.parameters(), lr=0.05, momentum=0.9)


def train(pipe: pp.Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        losses.append(pipe.step(x, targets=y).loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        total = 0.0
        for rows in (slice(0, 4), slice(4, 8)):
            loss = functional.mse_loss(model(x[rows]), y[rows]) / 2
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same(one: nn.Module, two: nn.Module) -> None:
    first, second = one.state_dict(), two.state_dict()
    assert list(first) == list(second)
    for name, value in first.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, second[name]), name


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 4},
        {"stages": 1},
        {"stages": 3, "schedule": "gpipe"},
        {"stages": 4, "placement": {i: i // 2 for i in range(4)}},
    ],
    ids=["4 stages", "1 stage", "gpipe", "two on a rank"],
)
def test_training_goes_on_with_another_division_as_if_nothing_had_happened(
    options: dict[str, Any], make: Any, tmp_path: Path
) -> None:  # UR-107, UR-112
    model = deep(stages=2)
    pipe = piped(model)
    optimizer = make(pipe)
    train(pipe, optimizer, range(3))
    pp.save(pipe, tmp_path, optimizer)
    expected = train(pipe, optimizer, range(3, 6))

    other = deep(stages=options["stages"])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    again = piped(other, **{key: value for key, value in options.items() if key != "stages"})
    resumed = make(again)
    torch.manual_seed(99)
    found = pp.load(again, tmp_path, resumed)
    assert found.steps == again.steps == 3
    assert other.restored == {"spared": True}
    actual = train(again, resumed, range(3, 6))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0.0)
    # Not bit for bit: a product of matrices may round otherwise where its operands lie otherwise in memory.
    for (name, ours), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_training_goes_on_in_the_plain_model_and_back(tmp_path: Path) -> None:
    pipe = piped(deep(stages=3), placement={0: 0, 1: 0, 2: 0})
    pipe.module.drop.p = 0.0
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(3))
    pp.save(pipe, tmp_path, optimizer)
    expected = train(pipe, optimizer, range(3, 5))

    plain = deep()
    plain.drop.p = 0.0
    theirs = adamw(plain)
    assert pp.load(plain, tmp_path, theirs).steps == 3
    torch.testing.assert_close(train_plain(plain, theirs, range(3, 5)), expected, rtol=1e-10, atol=0.0)
    pp.save(plain, tmp_path / "plain", theirs)

    back = piped(deep(stages=4))
    pp.load(back, tmp_path / "plain", adamw(back))
    same(back.module, plain)


def test_the_checkpoint_has_the_plain_names_and_each_tensor_once(tmp_path: Path) -> None:  # UR-105
    from torch.distributed.checkpoint import FileSystemReader

    model = deep(stages=3)
    path = pp.save(piped(model), tmp_path).wait()
    keys = set(FileSystemReader(path).read_metadata().state_dict_metadata)
    names = {name for name in model.state_dict() if name not in ("blocks.4.weight", "_extra_state")}
    assert {key for key in keys if "_extra_state" not in key} == {f"model.{name}" for name in names}
    assert (tmp_path / "latest").read_text() == f"{path.name}\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(2)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    path = pp.save(model, tmp_path).wait()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(other.weight, model.weight)


def test_of_many_layers_each_gets_its_own(tmp_path: Path) -> None:  # UR-106
    torch.manual_seed(3)
    one = nn.Sequential(*(nn.Linear(1, 1) for _ in range(120)))
    two = nn.Sequential(*(nn.Linear(1, 1) for _ in range(120)))
    pp.save(one, tmp_path)
    pp.load(two, tmp_path)
    same(one, two)


def test_a_parameter_without_state_has_none_after_loading(tmp_path: Path) -> None:  # UR-109
    model = deep()
    model.drop.p = 0.0
    pipe, whole = piped(model), deep()
    whole.drop.p = 0.0
    optimizer, theirs = adamw(pipe), adamw(whole)
    train(pipe, optimizer, range(2))
    train_plain(whole, theirs, range(2))
    pp.save(pipe, tmp_path, optimizer)
    model = deep(stages=3)
    model.drop.p, model.spared, whole.spared = 0.0, False, False
    pipe = piped(model)
    optimizer = adamw(pipe)
    pp.load(pipe, tmp_path, optimizer)
    assert model.spare.weight not in optimizer.state
    expected = train_plain(whole, theirs, range(2, 4))
    torch.testing.assert_close(train(pipe, optimizer, range(2, 4)), expected, rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("compiled", ["the model", "a part"])
def test_names_have_no_wrapper_in_them(compiled: str, tmp_path: Path) -> None:  # UR-110
    def wrapped() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if compiled == "a part":
            model[1] = torch.compile(model[1])
            return model
        return torch.compile(model)

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made = wrapped()
    pp.save(made, tmp_path)
    pp.load(plain, tmp_path)
    for one, two in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.equal(one, two)
    again = wrapped()
    pp.save(plain, tmp_path / "plain")
    pp.load(again, tmp_path / "plain")
    for one, two in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_models_plain_state_is_the_references(tmp_path: Path) -> None:  # UR-108
    pipe, whole = piped(deep(stages=4)), deep()
    for model in (pipe.module, whole):
        model.drop.p = 0.0
    train(pipe, momentum(pipe), range(3))
    train_plain(whole, momentum(whole), range(3))
    state = pipe.full_state_dict()
    assert list(state) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def test_what_else_is_saved_comes_back(tmp_path: Path) -> None:
    pipe = piped(deep())
    pp.save(pipe, tmp_path, extra={"epoch": 2, "best": [torch.ones(2), None]})
    expected = torch.rand(3)
    found = pp.load(pipe, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert found.extra["epoch"] == 2
    assert torch.equal(found.extra["best"][0], torch.ones(2))
    assert (found.ranks, found.optimizer, found.spec) == (1, None, None)
    state = torch.get_rng_state()
    pp.load(pipe, tmp_path, rng=False)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(pp.CallError, match="extra= holds something that is no plain data"):
        pp.save(pipe, tmp_path, extra={"model": pipe.module})


def test_a_model_on_meta_is_filled(tmp_path: Path) -> None:
    model = deep()
    pp.save(model, tmp_path)
    with torch.device("meta"):
        other = Deep(stages=3).double()
    pp.load(piped(other), tmp_path)
    same(model, other)
    assert other.blocks[0].weight is other.blocks[4].weight


def test_only_the_newest_are_kept_and_none_is_written_twice(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    names = [pp.save(model, tmp_path, keep=2).wait().name for _ in range(4)]
    assert names == ["step-0", "step-0-2", "step-0-3", "step-0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0", "step-0-3"]
    assert pp.load(model, tmp_path).path.name == "step-0"
    assert pp.load(model, tmp_path / "step-0-3").path.name == "step-0-3"


# -------------------------------------------------------------------- crashes and errors


@pytest.mark.parametrize("moment", ["write", "finish", "_point"])
def test_a_process_that_is_killed_while_it_saves_leaves_the_last_good_one(moment: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, torch
import ppdsl as pp
from ppdsl.runtime.checkpoints.saving import Part
model = torch.nn.Linear(2, 2)
torch.nn.init.constant_(model.weight, 1.0)
pp.save(model, {str(tmp_path)!r})
torch.nn.init.constant_(model.weight, 2.0)
inner = Part.{moment}
def killed(self):
    if {moment!r} == "write":
        inner(self)
    os.kill(os.getpid(), signal.SIGKILL)
Part.{moment} = killed
pp.save(model, {str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    model = nn.Linear(2, 2)
    assert pp.load(model, tmp_path).path.name == "step-0"
    assert (model.weight == 1.0).all()
    # What was left behind goes with the next one.
    pp.save(model, tmp_path)
    assert not list(tmp_path.glob(".writing-*"))


def test_an_error_while_writing_is_told_and_the_last_good_one_stays(tmp_path: Path, monkeypatch: Any) -> None:
    model = nn.Linear(2, 2)
    pp.save(model, tmp_path)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "_write", full)
    with pytest.raises(pp.RunError, match=r"Rank 0 could not write its part of .*No space left on device"):
        pp.save(model, tmp_path)
    monkeypatch.undo()
    assert pp.load(model, tmp_path).path.name == "step-0"


def test_saving_in_the_background_keeps_the_values_of_its_moment(tmp_path: Path, monkeypatch: Any) -> None:
    go = threading.Event()
    inner = saving.Part.write
    monkeypatch.setattr(saving.Part, "write", lambda self: (go.wait(), inner(self))[1])
    pipe = piped(deep())
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(2))
    before = {name: value.clone() for name, value in pipe.module.named_parameters()}
    handle = pp.save(pipe, tmp_path, optimizer, asynchronous=True)
    assert not handle.done
    train(pipe, optimizer, range(2, 4))
    go.set()
    assert handle.wait().name == "step-2"
    assert handle.done
    other = deep(stages=4)
    pp.load(piped(other), tmp_path)
    for name, value in other.named_parameters():
        assert torch.equal(value, before[name]), name


def test_an_error_in_the_background_comes_with_wait_and_with_the_next_save(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(self: Any) -> None:
        raise OSError("the disk is gone")

    model = nn.Linear(2, 2)
    with monkeypatch.context() as patched:
        patched.setattr(saving.Part, "write", broken)
        handle = pp.save(model, tmp_path, asynchronous=True)
        with pytest.raises(pp.RunError, match="the disk is gone"):
            handle.wait()
        pp.save(model, tmp_path, asynchronous=True)
        with pytest.raises(pp.RunError, match="the disk is gone"):
            pp.save(model, tmp_path)
        pp.save(model, tmp_path, asynchronous=True)
        with pytest.warns(pp.PpdslWarning, match="the disk is gone"):
            checkpoint._report()
    pp.save(model, tmp_path)
    assert not checkpoint._pending


def test_what_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(pp.CallError, match="There is no folder"):
        pp.load(model, tmp_path / "nowhere")
    with pytest.raises(pp.CallError, match=r"There is no complete checkpoint in .*, none"):
        pp.load(model, tmp_path)
    (tmp_path / ".writing-step-3-aa").mkdir()
    with pytest.raises(pp.CallError, match="only one that was never completed"):
        pp.load(model, tmp_path)
    with pytest.raises(pp.CallError, match="An object of type str is neither a pipeline nor a model"):
        pp.load("model", tmp_path)


def test_an_incomplete_checkpoint_is_refused_with_others_to_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    pp.save(model, tmp_path)
    path = pp.save(model, tmp_path).wait()
    data = next(path.glob("*.distcp"))
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(pp.CallError, match=r"incomplete-checkpoint.*distcp has \d+ of \d+ bytes"):
        pp.load(model, tmp_path)
    (path / ".metadata").unlink()
    with pytest.raises(pp.CallError, match=r"has no \.metadata(.|\n)*load one of these folders: step-0$"):
        pp.load(model, tmp_path)


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    pipe = piped(deep())
    optimizer = adamw(pipe)
    train(pipe, optimizer, range(1))
    pp.save(pipe, tmp_path, optimizer)
    with pytest.raises(pp.CallError, match="2 tensors of the model are missing in the checkpoint"):
        pp.load(piped(deep(blocks=6)), tmp_path)
    with pytest.raises(pp.CallError, match="holds the state of AdamW, but the optimizer is SGD"):
        pp.load(pipe, tmp_path, momentum(pipe))
    one = torch.optim.AdamW(pipe.parameters())
    with pytest.raises(
        pp.CallError, match=r"Group 0 of the optimizer has `.*weight`, saved with weight_decay=0.1, and"
    ):
        pp.load(pipe, tmp_path, one)
    stray = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(pp.CallError, match="Parameter 0 of the optimizer's group 0 is none of the model's"):
        pp.save(pipe, tmp_path, stray)
    pp.save(pipe, tmp_path)
    with pytest.raises(pp.CallError, match="holds no optimizer's state"):
        pp.load(pipe, tmp_path, optimizer)
    with pytest.raises(pp.CallError, match="keep is 0"):
        pp.save(pipe, tmp_path, keep=0)
    with torch.device("meta"):
        empty = Deep()
    with pytest.raises(pp.CallError, match="is on meta: it has no values to save"):
        pp.save(empty, tmp_path)


def test_tied_copies_in_groups_of_other_options_are_refused() -> None:  # UR-018
    from ppdsl.runtime.checkpoints.optimizer_state import OptimizerState, merge_groups

    one = OptimizerState("SGD", (({"lr": 0.1}, ("w", "a")),), {})
    two = OptimizerState("SGD", (({"lr": 0.2}, ("w", "b")),), {})
    with pytest.raises(
        pp.CallError, match=r"Ranks optimise the tied parameter `w` differently: with lr=0.1 and with lr=0.2"
    ):
        merge_groups([one, two])
    assert merge_groups([one, one]) == [{"options": {"lr": 0.1}, "names": ["w", "a"]}]


def test_nothing_is_warned_of(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = piped(deep())
        optimizer = adamw(pipe)
        train(pipe, optimizer, range(1))
        pp.save(pipe, tmp_path, optimizer)
        pp.load(pipe, tmp_path, optimizer)
