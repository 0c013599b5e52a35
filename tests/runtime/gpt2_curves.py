"""GPT-2 on the text that ships with Python: the loss of every step, in the plain loop and in pipelines.

python -m tests.runtime.gpt2_curves    every schedule on 1, 2 and 4 ranks of one process, then in as many processes
python -m tests.runtime.gpt2_curves float32    the curves that docs/guides/train-gpt2.md shows
"""

from __future__ import annotations

import ast
import os
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import ppdsl as pp
from tests.runtime.launch import launch, said
from tests.runtime.saying import keep_others_apart, say

STEPS, ROWS, LENGTH, BLOCKS, WORDS = 200, 8, 32, 6, 128
UNITS = BLOCKS + 2
MICROBATCHES = 4
STAGES_PER_RANK = {"1f1b": 1, "zbv": 2, "interleaved": 2}
RANKS = (1, 2, 4)
SHOWN, EVERY = (("1f1b", 4), ("zbv", 2), ("interleaved", 2)), 20
"""What docs/guides/train-gpt2.md shows: schedules with their ranks, and every how many steps."""


def corpus() -> Tensor:
    """Return the bytes of Python's own documentation; what is no ASCII is left out."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")))


def batches(steps: int) -> Iterator[Tensor]:
    """Give the same pieces of the text to whoever asks."""
    text, chance = corpus(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=chance)
        yield text[starts + torch.arange(LENGTH)]


def gpt2(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    """Return a small GPT-2 with random weights, always the same ones; its head is its table of words."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=BLOCKS, n_head=2, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def next_bytes(output: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of guessing each next byte; the model's own one would turn to single precision."""
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def plain_curve(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[float]:
    """Train the whole model on whole batches."""
    model = gpt2(dtype)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for tokens in batches(steps):
        loss = next_bytes(model(input_ids=tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def piped(model: GPT2LMHeadModel, schedule: str, ranks: int) -> pp.Pipeline:
    """Divide a model into as many stages as the schedule wants on so many ranks."""
    stages = ranks * STAGES_PER_RANK[schedule]
    pp.unmark(model)
    for unit in range(1, UNITS):
        stage = unit * stages // UNITS
        if stage != (unit - 1) * stages // UNITS:
            pp.begin(model.transformer.h[unit - 1] if unit <= BLOCKS else model.transformer.ln_f, stage)
    (tokens,) = batches(1)
    part = tokens[: ROWS // MICROBATCHES]
    return pp.pipeline(
        model, kwargs={"input_ids": part}, targets=part, loss=next_bytes, schedule=schedule, microbatches=MICROBATCHES,
        timeout=60.0,
    )  # fmt: skip


def curve(schedule: str, ranks: int, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[float]:
    """Train in a pipeline, in this process or in all processes."""
    pipe = piped(gpt2(dtype), schedule, ranks)
    optimizer = optimizer_of(pipe.parameters())
    losses = []
    for tokens in batches(steps):
        losses.append(pipe.step(input_ids=tokens, targets=tokens).loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()
    return losses


def apart(ours: list[float], theirs: list[float]) -> float:
    """Return how far two curves are apart where they are furthest."""
    return max(abs(one - two) for one, two in zip(ours, theirs, strict=True))


def show_single() -> None:
    """Print the single-precision curves as docs/guides/train-gpt2.md shows them."""
    curves = {"plain loop": plain_curve(dtype=torch.float32)}
    for schedule, ranks in SHOWN:
        curves[f"{schedule}, {ranks} ranks"] = curve(schedule, ranks, dtype=torch.float32)
    print(f"| step | {' | '.join(curves)} |\n|---:|{'---:|' * len(curves)}")
    for step in (0, *range(EVERY - 1, STEPS, EVERY)):
        print(f"| {step + 1} | {' | '.join(f'{losses[step]:.4f}' for losses in curves.values())} |")
    print(drawn(curves["plain loop"]))


def drawn(losses: list[float], width: int = 50, height: int = 10) -> str:
    """Return a curve of means over neighbouring steps as lines of text."""
    share = len(losses) / width
    parts = [losses[int(i * share) : max(int(i * share) + 1, int((i + 1) * share))] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    top, bottom = max(means), min(means)
    levels = [round((top - mean) / (top - bottom) * (height - 1)) for mean in means]
    lines = []
    for row in range(height):
        label = f"{top - (top - bottom) * row / (height - 1):5.2f} |"
        lines.append(label + "".join("*" if level == row else " " for level in levels).rstrip())
    return "\n".join([*lines, f"      +{'-' * width}", f"       1{'step':^{width - 4}}{len(losses)}"])


def everything(steps: int) -> None:
    """Print how far each curve is from the plain one, in one process and then in several."""
    begun = time.perf_counter()
    plain = plain_curve(steps)
    print(f"plain loop: {plain[0]:.4f} to {plain[-1]:.4f} ({time.perf_counter() - begun:.1f} s)", flush=True)
    for schedule in STAGES_PER_RANK:
        for ranks in RANKS:
            begun = time.perf_counter()
            far = apart(curve(schedule, ranks, steps), plain)
            print(f"{schedule} on {ranks}: {far:.1e} ({time.perf_counter() - begun:.1f} s)", flush=True)
    for ranks in RANKS[1:]:
        begun = time.perf_counter()
        for schedule, losses in curves_of_processes(ranks, dict.fromkeys(STAGES_PER_RANK, steps)).items():
            print(f"{schedule} on {ranks} processes: {apart(losses, plain):.1e}")
        print(f"{ranks} processes: {time.perf_counter() - begun:.1f} s", flush=True)


def curves_of_processes(ranks: int, steps: dict[str, int]) -> dict[str, list[float]]:
    """Train under each schedule for so many steps in as many processes; every one of them gets every loss."""
    done = launch(ranks, *(f"{schedule}={n}" for schedule, n in steps.items()), seconds=300.0, worker=Path(__file__))
    texts = {said(done, rank) for rank in range(ranks)}
    if done.returncode or len(texts) != 1:
        raise RuntimeError(done.stderr)
    return {name: ast.literal_eval(rest) for name, _, rest in (line.partition(" ") for line in texts.pop().split("\n"))}


def in_a_process(arguments: list[str]) -> None:
    """Be one rank of several."""
    dist.init_process_group("gloo")
    for schedule, _, steps in (argument.partition("=") for argument in arguments):
        say(f"{schedule} {curve(schedule, dist.get_world_size(), int(steps))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        keep_others_apart()
        in_a_process(sys.argv[1:])
    elif sys.argv[1:] == ["float32"]:
        show_single()
    else:
        everything(STEPS)
