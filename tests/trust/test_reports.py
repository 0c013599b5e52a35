"""Traps of sizes, calls and endings, one short test each; and where those stand that tests elsewhere cover."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ppdsl as pp
from tests.runtime.every_family import SCHEDULES, options_for
from tests.trust.entry import Entry, Setup, differences
from tests.trust.graphs import WIDTH, Layers, mean_square, numbers

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = {
    "UR-039": ("tests/runtime/test_distributed.py", "test_the_users_own_messages_do_not_meet_the_pipelines"),
    "UR-063": (
        "tests/runtime/test_distributed.py",
        "test_different_models_are_refused_on_every_rank_before_the_first_message",
    ),
    "UR-066": ("tests/runtime/test_families_run.py", "test_every_schedule_runs_on_real_processes"),
    "UR-067": ("tests/plan/test_rendezvous.py", "test_the_verdict_is_that_of_channels_without_capacity"),
    "UR-077": ("tests/schedule/test_laws_of_families.py", "test_csv_text_is_read_back_unchanged"),
    "UR-082": ("tests/runtime/test_splitting.py", "test_i_and_w_together_are_the_whole_backward"),
    "UR-092": ("tests/test_example_specs.py", "test_a_step_under_a_spec_is_the_model_s_own"),
    "UR-093": ("tests/zoo/test_zoo.py", "test_model_in_train_mode_gives_the_gradients_of_the_whole_model"),
    "UR-095": ("tests/test_examples.py", "test_an_example_trains_like_the_plain_loop"),
    "UR-102": ("tests/spec/test_split.py", "test_no_division_has_a_smaller_largest_part"),
    "UR-104": ("tests/spec/test_split.py", "test_no_division_has_a_smaller_largest_part"),
    "UR-151": ("tests/schedule/test_formulas.py", "test_gpipe_1f1b_and_loops_are_exact_for_all_times"),
}
"""Reports that a test covers which is about more than the report: file and test."""


@pytest.mark.parametrize("report", ELSEWHERE)
def test_the_test_that_covers_a_report_is_there(report: str) -> None:
    file, name = ELSEWHERE[report]
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


class Deep(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(stages))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for key, layer in enumerate(self.layers):
            with pp.stage(key):
                x = torch.tanh(layer(x)) + x
        return x


def deep(stages: int) -> Entry:
    def make(microbatches: int) -> Setup:
        x, y = numbers(microbatches, 4), numbers(microbatches, 4, seed=1)
        return Setup(Deep(stages), (x,), targets=(y,), loss=mean_square)

    return Entry(f"{stages} stages", ("UR-064", "UR-065", "UR-071"), make)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "auto"])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_fewer_micro_batches_than_stages_train_under_every_schedule(
    schedule: str, microbatches: int
) -> None:  # UR-064, UR-065
    entry = deep(6)
    assert differences(entry, microbatches, steps=1, **options_for(schedule, 6, 3)) == []


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_any_number_of_stages_has_the_same_numbers(stages: int) -> None:  # UR-071
    assert differences(deep(stages), 3, schedule="1f1b") == []


@pytest.mark.parametrize(("schedule", "stages"), [("interleaved(v=1)", 1), ("interleaved(v=1)", 3), ("1f1b", 1)])
def test_one_chunk_or_one_stage_is_no_special_case(schedule: str, stages: int) -> None:  # UR-080
    assert differences(deep(stages), 4, schedule=schedule) == []


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("zbv", 4), ("interleaved(v=1)", 2), ("interleaved(v=4)", 2), ("zbv", 1)]
)
def test_a_schedule_and_a_placement_with_other_stages_on_a_rank_are_refused_with_both_numbers(
    schedule: str, ranks: int
) -> None:  # UR-076
    x = torch.zeros(2, 4, dtype=torch.float64)
    placement = {key: key % ranks for key in range(4)}
    with pytest.raises(pp.ScheduleError, match=rf"4(.|\n)*{ranks}|{ranks}(.|\n)*4"):
        pp.pipeline(Deep(4), (x,), loss=Tensor.sum, microbatches=4, schedule=schedule, placement=placement)


def test_1f1b_takes_two_stages_on_a_rank() -> None:  # UR-076
    assert differences(deep(4), 4, schedule="1f1b", placement={key: key % 2 for key in range(4)}) == []


class Translator(nn.Module):
    """Both decoder stages read the encoder's output, a mask, and a position bias; what is None or bool goes along."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.encode = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bias = nn.Embedding(3, 4)
        self.double()

    def attend(self, h: Tensor, memory: Tensor, mask: Tensor, bias: Tensor, past: object, *, use_cache: bool) -> Tensor:
        assert past is None
        assert not use_cache
        scores = (h @ memory.transpose(1, 2) + bias[:, :, None].sum(-1)).masked_fill(~mask[:, None, :], -1e9)
        return scores.softmax(-1) @ memory

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
        past: object = None,
        use_cache: bool = False,
    ) -> Tensor:
        with pp.stage("enter"):
            h = torch.tanh(self.enter(x))
        with pp.stage("encode"):
            memory = torch.tanh(self.encode(h)) + h
        with pp.stage("first"):
            bias = self.bias(torch.arange(3))[None]
            z = self.first(y)
            z = z + self.attend(z, memory, mask, bias, past, use_cache=use_cache)
        with pp.stage("second"):
            z = self.second(z)
            return z + self.attend(z, memory, mask, bias, past, use_cache=use_cache)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble(h1)"])
def test_what_every_decoder_stage_reads_gets_the_sum_of_their_gradients(schedule: str) -> None:  # UR-006
    def make(microbatches: int) -> Setup:
        x, y, goal = (numbers(microbatches, 3, 4, seed=seed) for seed in range(3))
        mask = torch.arange(3) < 1 + torch.arange(len(x))[:, None] % 3
        return Setup(Translator(), (x, y), {"mask": mask, "past": None, "use_cache": False}, (goal,), mean_square)

    assert differences(Entry("translator", ("UR-006",), make), 4, schedule=schedule) == []


class Masked(Layers):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(h) * self.mask


def test_an_attribute_with_the_rows_of_the_whole_batch_is_an_error_and_no_wrong_number() -> None:  # UR-049
    x = numbers(4, WIDTH)
    mask = torch.arange(8, dtype=torch.float64)[:, None]
    with pytest.raises(RuntimeError, match="8"):
        pp.pipeline(Masked(mask), (x[:2],), loss=Tensor.sum, microbatches=4)
    model = Masked(mask[:2])
    pipe = pp.pipeline(model, (x[:2],), loss=Tensor.sum, microbatches=4)
    model.mask = mask
    with pytest.raises((pp.RunError, RuntimeError), match=r"8"):
        pipe.step(x)


def test_micro_batches_of_several_lengths_are_steps_of_their_own() -> None:  # UR-056
    """A batch is a tensor, so a step has one length; steps of other lengths add up to the same gradients."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            with pp.stage(0):
                h = self.table(x)
            with pp.stage(1):
                return self.head(h + h.mean(1, keepdim=True))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    model, whole = Words(), Words()
    batches = [torch.randint(9, (2, length)) for length in (8, 16, 12, 16)]
    pipe = pp.pipeline(model, (batches[0][:1],), targets=batches[0][:1], loss=loss, microbatches=2, reduction="sum")
    for tokens in batches:
        pipe.step(tokens, targets=tokens)
        loss(whole(tokens), tokens).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


SCRIPT = """
import torch, ppdsl as pp
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
pp.begin(model[1], 1)
x = torch.randn(4, 4)
pipe = pp.pipeline(model, (x[:2],), loss=torch.Tensor.sum, microbatches=2)
pipe.step(x)
saving = pp.save(pipe, FOLDER, asynchronous=True)
ENDING
"""


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("1 / 0", 1)])
def test_a_script_that_closes_nothing_ends_with_its_own_code(ending: str, code: int, tmp_path: Path) -> None:  # UR-075
    text = SCRIPT.replace("FOLDER", repr(str(tmp_path))).replace("ENDING", ending)
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, timeout=120, check=False, capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    # What was begun is complete.
    assert (tmp_path / "latest").read_text() == "step-1\n"


def test_more_stages_are_wanted_than_there_are_cuts(tmp_path: Path) -> None:  # UR-101
    (tmp_path / "net.ppspec").write_text("pipeline net { split layers[*] into 5 as part[i] }")
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(pp.SpecError, match=r"(5(.|\n)*3|3(.|\n)*5)"):
        pp.pipeline(Deep(3), (x,), loss=Tensor.sum, spec=tmp_path / "net.ppspec", microbatches=2)
