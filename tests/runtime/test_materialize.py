from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ppdsl as pp
from ppdsl.runtime.checkpoints import safetensors_io
from ppdsl.runtime.checkpoints.initialising import initialise
from ppdsl.runtime.checkpoints.materialize import fill
from ppdsl.runtime.checkpoints.subject import Subject
from tests.runtime.models import CASES, batch_of, pipeline_of


class Attentive(nn.Module):
    """Ties, an initialiser that reaches into a child, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.turn = Rotary()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        with pp.stage(0):
            h = self.turn(self.table(x))
        with pp.stage(1):
            h = h + self.attention(h, h, h, need_weights=False)[0]
        with pp.stage(2):
            h = self.turn(self.norm(h.transpose(1, 2)).transpose(1, 2))
        with pp.stage(3):
            return self.head(h)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles.copy_(torch.arange(8.0) / 8)

    def forward(self, x):
        return x * self.angles.cos()


def on_meta(kind: type[nn.Module] = Attentive) -> nn.Module:
    with torch.device("meta"):
        return kind()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(12).reshape(4, 3) % 7, torch.arange(12).reshape(4, 3) % 7


def loss(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def piped(model: nn.Module, ranks: int = 4) -> pp.Pipeline:
    x, y = example()
    place = {key: key % ranks for key in range(4)}
    return pp.pipeline(model, (x[:2],), targets=y[:2], loss=loss, microbatches=2, placement=place)


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def same(one: nn.Module, two: nn.Module) -> None:
    first, second = everything(one), everything(two)
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.device.type == "cpu"
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_initial_values_are_the_plain_models_for_any_number_of_ranks(ranks: int) -> None:  # UR-115
    plain, model = on_meta(), on_meta()
    pp.materialize(plain, seed=11)
    before = torch.get_rng_state()
    pipe = piped(model, ranks)
    pp.materialize(pipe, seed=11)
    assert torch.equal(before, torch.get_rng_state())
    same(model, plain)
    assert model.head.weight is model.table.weight
    assert isinstance(model.head.weight, nn.Parameter)
    x, y = example()
    pipe.step(x, targets=y)
    pp.materialize(other := on_meta(), seed=12)
    assert not torch.equal(other.table.weight, plain.table.weight)


def test_values_are_those_of_the_modules_own_initialisers() -> None:
    made = on_meta()
    pp.materialize(made, seed=3)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(made.table.weight[:, 0], made.head.weight[:, 0])
        table = nn.Embedding(7, 8)
        output = nn.Linear(8, 8)
        attention = torch.empty(24, 8)
        nn.init.xavier_uniform_(attention)
        head = nn.Linear(8, 7, bias=False)
    # The tied weight is what its last module makes of it, as when constructors run.
    assert table.weight.shape == made.table.weight.shape
    assert torch.equal(made.head.weight, head.weight)
    assert torch.equal(made.attention.out_proj.weight, output.weight)
    assert torch.equal(made.attention.in_proj_weight, attention)
    assert (made.attention.out_proj.bias == 0).all()
    assert (made.norm.running_var == 1).all()
    assert made.norm.num_batches_tracked == 0
    assert torch.equal(made.turn.angles, torch.arange(8.0) / 8)


def test_modules_that_are_alike_do_not_start_alike() -> None:  # UR-115
    with torch.device("meta"):
        twins = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pp.materialize(twins)
    assert not torch.equal(twins[0].weight, twins[1].weight)


def test_init_runs_after_a_modules_own_initialiser() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.5)
            nn.init.zeros_(module.bias)

    case = CASES["chain"]
    with torch.device("meta"):
        plain, model = case.make(), case.make()
    for target in (plain, pipeline_of(case, model.double())):
        pp.materialize(target, init=init, seed=5)
    assert not torch.equal(plain.a.weight, plain.b.weight)
    assert 0.2 < plain.a.weight.std() < 0.8
    assert (model.c.bias == 0).all()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.empty(4, dtype=torch.bool), persistent=False)
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with pp.stage(0):
            x = self.inner(x)
        with pp.stage(1):
            return (x * self.scale).masked_fill(self.mask, 0.0).sum()


def test_what_nothing_initialises_is_named_with_the_remedy() -> None:  # UR-113, UR-116
    model = on_meta(Bare)
    pipe = pp.pipeline(model, (torch.ones(2, 4),), microbatches=1)
    with pytest.raises(pp.CallError) as caught:
        pp.materialize(pipe)
    assert str(caught.value) == (
        "error[no-initialiser]: Nothing gives values to parameter `scale`: Bare is a class without "
        "reset_parameters().\n"
        "help: give init=, a function that fills a module's own parameters, or weights=\n\n"
        "error[no-buffer-values]: Nothing gives values to buffer `mask`, which no state dictionary and no initialiser "
        "holds.\n"
        "help: let reset_parameters() of its module compute it, or init=, a function of a module; or build the model "
        "with real buffers and only its parameters on meta"
    )
    # Nothing is half done, and what has no values is refused before the first step.
    assert all(tensor.is_meta for tensor in everything(model).values())
    with pytest.raises(pp.CallError, match="is on meta: it has no values"):
        pipe.step(torch.ones(2, 4))

    def init(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.ones_(module.scale)
            module.mask = torch.tensor([False, True, False, True])

    pp.materialize(pipe, init=init)
    assert model.mask.tolist() == [False, True, False, True]
    pipe.step(torch.ones(2, 4))


def part_of(subject: Subject, prefix: str) -> Subject:
    """Return what a rank sees that owns only what begins with `prefix`."""
    return replace(subject, slots=tuple(replace(slot, mine=slot.name.startswith(prefix)) for slot in subject.slots))


def test_a_rank_draws_the_values_of_others_and_leaves_them_on_meta() -> None:
    plain, model = on_meta(), on_meta()
    pp.materialize(plain, seed=2)
    part = part_of(piped(model).subject(), "attention.")
    initialise(part, part.slots, None, 2)
    for name, value in everything(model).items():
        assert value.is_meta != name.startswith("attention."), name
        assert value.is_meta or torch.equal(value, everything(plain)[name]), name


def test_an_initialiser_that_writes_to_another_ranks_tensors_is_refused() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, Attentive):
            nn.init.zeros_(module.table.weight)

    part = part_of(piped(on_meta()).subject(), "attention.")
    with pytest.raises(pp.CallError, match="The initialiser of `the model` writes to tensors that are not its own"):
        initialise(part, part.slots, init, 0)


def test_an_initialiser_that_fails_is_named_and_nothing_is_changed() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm1d):
            raise KeyError("momentum")

    model = on_meta()
    with pytest.raises(pp.CallError, match="The initialiser of `norm` failed: KeyError: 'momentum'"):
        pp.materialize(piped(model), init=init)
    assert all(tensor.is_meta for tensor in everything(model).values())


def test_only_the_tensors_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Attentive()
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    one, two = names[: len(names) // 2], names[len(names) // 2 :]
    save_file({name: state[name].contiguous() for name in one}, tmp_path / "model-1.safetensors")
    save_file({name: state[name].contiguous() for name in two}, tmp_path / "model-2.safetensors")
    where = {name: f"model-{1 if name in one else 2}.safetensors" for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))

    got: list[str] = []

    class Counting:
        def __init__(self, *args, **kwargs):
            self.opened = safe_open(*args, **kwargs)

        def __enter__(self):
            self.inner = self.opened.__enter__()
            return self

        def __exit__(self, *error):
            return self.opened.__exit__(*error)

        def keys(self):
            return self.inner.keys()

        def get_slice(self, name):
            return self.inner.get_slice(name)

        def get_tensor(self, name):
            got.append(name)
            return self.inner.get_tensor(name)

    safe_open = safetensors_io.safe_open
    monkeypatch.setattr(safetensors_io, "safe_open", Counting)
    for weights in (tmp_path, index):
        got.clear()
        model = on_meta()
        pp.materialize(piped(model), weights)
        same(model, plain)  # UR-113: the rotary table is computed, UR-014: the tie holds one object
        assert sorted(got) == names
    # A rank that owns less reads less.
    got.clear()
    model = on_meta()
    fill(part_of(piped(model).subject(), "attention."), safetensors_io.SafetensorsSource(tmp_path))
    assert sorted(got) == [name for name in names if name.startswith("attention.")]
    assert model.table.weight.is_meta


def test_wrong_weights_are_one_error_with_all_names_and_nothing_is_written() -> None:
    state = dict(Attentive().state_dict())
    state["attention.in_proj_wieght"] = state.pop("attention.in_proj_weight")
    state["norm.weight"] = torch.ones(9)
    model = on_meta()
    with pytest.raises(pp.CallError) as caught:
        pp.materialize(piped(model), state)
    assert str(caught.value) == (
        "error[missing-weights]: 1 tensor of the model is missing in the given state.\n"
        "  attention.in_proj_weight (is it `attention.in_proj_wieght`?)\n\n"
        "error[unexpected-weights]: 1 tensor in the given state is unknown to the model.\n"
        "  attention.in_proj_wieght (is it `attention.in_proj_weight`?)\n\n"
        "error[wrong-weight-shapes]: 1 tensor in the given state is of another shape than in the model.\n"
        "  norm.weight: [9] there, [8] in the model"
    )
    assert all(tensor.is_meta for tensor in everything(model).values())
    state["norm.weight"] = torch.ones(8)
    pp.materialize(piped(model), state, strict=False)
    assert torch.equal(model.table.weight, state["table.weight"])
    assert model.attention.in_proj_weight.isfinite().all()


def test_weights_that_are_not_there_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(pp.CallError, match="There is no safetensors file in"):
        pp.materialize(on_meta(), tmp_path)
    with pytest.raises(pp.CallError, match=r"There is no .*nothing.safetensors"):
        pp.materialize(on_meta(), tmp_path / "nothing.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(pp.CallError, match=r"bad\.safetensors cannot be read"):
        pp.materialize(on_meta(), tmp_path / "bad.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(pp.CallError, match=r"lists files that are not there: gone\.safetensors"):
        pp.materialize(on_meta(), tmp_path)


def test_training_after_materialising_on_meta_equals_the_plain_model() -> None:  # UR-014, UR-017
    case = CASES["tied"]
    whole = case.model()
    with torch.device("meta"):
        model = case.make().double()
    pipe = pipeline_of(case, model)
    twin = case.model()
    reference = pipeline_of(case, twin)
    pp.materialize(pipe, whole.state_dict())
    model.w = nn.Parameter(model.w.detach().clone())
    inputs, targets = batch_of(case)
    for target in (pipe, reference):
        optimizer = torch.optim.AdamW(target.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            target.step(*inputs, targets=targets)
            optimizer.step()
            optimizer.zero_grad()
    for name, value in twin.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name


@pytest.mark.parametrize("form", ["file", "folder"])
def test_what_is_exported_can_be_read_back(form: str, tmp_path: Path) -> None:
    torch.manual_seed(8)
    plain = Attentive()
    path = tmp_path / ("all.safetensors" if form == "file" else "all")
    assert pp.export_safetensors(piped(plain), path) == path
    model = on_meta()
    pp.materialize(model, path)
    same(model, plain)
    with pytest.raises(pp.CallError, match="is on meta: it has no values to write"):
        pp.export_safetensors(on_meta(), path)
