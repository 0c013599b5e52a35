"""Recording GPT-2 of growing depth in four stages, beside what torch itself offers for it.

Four ways over the same model and the same micro-batch, taken in turns so that a noisy machine troubles all alike:

- `ppdsl`: the stage graph with its programs, gradients planned, recorded twice to find what the first run hid;
- `again`: the same once more on the very same model;
- `torch.distributed.pipelining.pipeline()`: exports the whole model, then splits the export;
- `fakes`: a plain forward on fake tensors, what the cheapest recording that runs the model once would cost.

Numbers are CPU seconds, medians over the rounds; `ms a layer` is the growth from the depth before, for each layer more.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import SplitPoint, pipeline

import ppdsl as pp
from ppdsl.recording.record import record_call

__all__ = ["main", "rows"]

STAGES = 4
DEPTHS = (12, 24, 48, 96)
WAYS = ("ppdsl", "again", "pipeline", "fakes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    results = rows(options.layers, width=options.width, repeats=options.repeats)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(_table(results))
    return 0


def rows(depths: Sequence[int] = DEPTHS, *, width: int = 64, repeats: int = 3) -> list[dict[str, Any]]:
    """Return one row for each depth: `layers`, and for each way all its CPU seconds and their median.

    Args:
        depths: Numbers of layers.
        width: Of the model.
        repeats: Rounds; one more is run before them, with the first depth.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = {layers: _gpt2(layers, width) for layers in depths}
    seconds: dict[int, dict[str, list[float]]] = {layers: {way: [] for way in WAYS} for layers in depths}
    _round(cases[depths[0]], depths[0])
    for _ in range(repeats):
        for layers, model in cases.items():
            for way, spent in _round(model, layers).items():
                seconds[layers][way].append(spent)
    return [
        {"layers": layers, "seconds": found, "median": {way: statistics.median(all_) for way, all_ in found.items()}}
        for layers, found in seconds.items()
    ]


def _round(model: nn.Module, layers: int) -> dict[str, float]:
    """Take all ways once."""
    tokens = torch.arange(32).reshape(2, 16) % 90 + 3
    call = {"input_ids": tokens, "attention_mask": (tokens != tokens[1, 15]).long(), "labels": tokens}
    cuts = [f"transformer.h.{layers * stage // STAGES}" for stage in range(1, STAGES)]
    # pipeline() patches the model it is given: a second call would recurse.
    own, other, third = (copy.deepcopy(model) for _ in range(3))
    for key, name in enumerate(cuts, start=1):
        pp.begin(own.get_submodule(name), key)
    return {
        "ppdsl": _spent(lambda: _ppdsl(own, call)),
        "again": _spent(lambda: _ppdsl(own, call)),
        "pipeline": _spent(lambda: _torch(other, cuts, call)),
        "fakes": _spent(lambda: _fake(third, call)),
    }


def _spent(way: Callable[[], object]) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


def _gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96, n_positions=64, n_embd=width, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2
    )
    config.use_cache = False
    model: nn.Module = GPT2LMHeadModel(config).eval()
    return model


def _ppdsl(model: nn.Module, call: dict[str, Any]) -> object:
    recording = record_call(model, (), dict(call))
    if len(recording.programs) != STAGES:
        raise SystemExit(f"{len(recording.programs)} stages instead of {STAGES}")
    return recording


def _torch(model: nn.Module, cuts: Sequence[str], call: dict[str, Any]) -> object:
    split = dict.fromkeys(cuts, SplitPoint.BEGINNING)
    pipe = pipeline(model, mb_args=(), mb_kwargs=dict(call), split_spec=split)
    if pipe.num_stages != STAGES:
        raise SystemExit(f"pipeline() gave {pipe.num_stages} stages instead of {STAGES}")
    return pipe


def _fake(model: nn.Module, call: dict[str, Any]) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = mode.from_tensor(tensor)
        return model(**{name: mode.from_tensor(tensor) for name, tensor in call.items()})


def _table(results: Sequence[dict[str, Any]]) -> Table:
    title = f"Recording GPT-2 of width 64 in {STAGES} stages, torch {torch.__version__}, CPU seconds"
    table = Table(title=title, caption="medians; the rounds of all ways alternate; `x` is of pipeline() by ppdsl")
    for head in ("layers", *WAYS, "fastest to slowest ppdsl", "ms a layer", "x pipeline", "x fakes"):
        table.add_column(head, justify="right")
    before = (0, 0.0)
    for row in results:
        layers, median, own = row["layers"], row["median"], row["seconds"]["ppdsl"]
        growth = 1e3 * (median["ppdsl"] - before[1]) / (layers - before[0])
        before = (layers, median["ppdsl"])
        table.add_row(
            str(layers), *(f"{median[way]:.2f}" for way in WAYS), f"{min(own):.2f} to {max(own):.2f}", f"{growth:.1f}",
            f"{median['pipeline'] / median['ppdsl']:.1f}", f"{median['ppdsl'] / median['fakes']:.1f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
