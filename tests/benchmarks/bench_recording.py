"""Recording a deep GPT-2 in four stages, beside what torch itself offers for it.

Three ways over the same model and the same micro-batch, taken in turns so that a noisy machine troubles all alike:

- `ppdsl`: the stage graph with its programs, gradients planned, each recorded twice to find what the first run hid;
- `torch.distributed.pipelining.pipeline()`: exports the whole model, then splits the export;
- a plain forward on fake tensors: what the cheapest imaginable recording costs.

`python tests/benchmarks/bench_recording.py --json recording.json`
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

__all__ = ["main"]

STAGES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds; one more is run before them")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = _gpt2(options.layers, options.width)
    tokens = torch.arange(32).reshape(2, 16) % 90 + 3
    call = {"input_ids": tokens, "attention_mask": (tokens != tokens[1, 15]).long(), "labels": tokens}
    cuts = [f"transformer.h.{options.layers * stage // STAGES}" for stage in range(1, STAGES)]
    ways: dict[str, Callable[[nn.Module], object]] = {
        "ppdsl": lambda copied: _ppdsl(copied, cuts, call),
        "pipelining.pipeline() of torch": lambda copied: _torch(copied, cuts, call),
        "plain forward on fake tensors": lambda copied: _fake(copied, call),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.repeats + 1):
        for name, way in ways.items():
            copied = copy.deepcopy(model)  # pipeline() patches the model it is given: a second call would recurse
            start = time.process_time()
            way(copied)
            spent = time.process_time() - start
            if round_:
                seconds[name].append(spent)
    results = {
        "torch": torch.__version__,
        "layers": options.layers,
        "width": options.width,
        "stages": STAGES,
        "unit": "CPU seconds",
        "seconds": seconds,
        "median": {name: statistics.median(values) for name, values in seconds.items()},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(_table(results))
    return 0


def _gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96, n_positions=64, n_embd=width, n_layer=layers, n_head=4, bos_token_id=1, eos_token_id=2
    )
    config.use_cache = False
    model: nn.Module = GPT2LMHeadModel(config).eval()
    return model


def _ppdsl(model: nn.Module, cuts: Sequence[str], call: dict[str, Any]) -> object:
    for key, name in enumerate(cuts, start=1):
        pp.begin(model.get_submodule(name), key)
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


def _table(results: dict[str, Any]) -> Table:
    title = f"GPT-2, {results['layers']} layers of width {results['width']}, {STAGES} stages, torch {results['torch']}"
    table = Table(title=title, caption="CPU seconds; the rounds of the three ways alternate")
    table.add_column("way")
    for head in ("median", "fastest", "slowest", "of ppdsl's"):
        table.add_column(head, justify="right")
    own = results["median"]["ppdsl"]
    for name, values in results["seconds"].items():
        median = results["median"][name]
        table.add_row(name, f"{median:.2f}", f"{min(values):.2f}", f"{max(values):.2f}", f"{median / own:.2f}x")
    return table


if __name__ == "__main__":
    sys.exit(main())
