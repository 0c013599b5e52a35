"""What the processes of the test of random numbers run: `randomness_worker.py FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import ppdsl as pp
from tests.runtime.saying import keep_others_apart, say
from tests.runtime.test_randomness import hash_of, masked, masks, same, trained

WAYS: tuple[tuple[list[str], list[tuple[int, str]], dict[str, Any]], ...] = (
    (["SameTwice", "Checkpointed"], [(1, "linear")], {"schedule": "1f1b"}),
    (["Calls", "CheckpointedModules"], [(0, "inner")], {"schedule": "zero_bubble", "recompute": [1]}),
    (["OwnThenChild", "Noise"], [(0, "inner"), (1, "linear"), (1, "inner")], {"schedule": "zbv"}),
)


def equal(kinds: list[str], cuts: list[tuple[int, str]], options: dict[str, Any]) -> str:
    found, pipe = trained(kinds, cuts, timeout=60.0, **options)
    expected, _ = trained(kinds, runtime="inprocess")
    mine = {name for name, _ in pipe.named_parameters()}
    names = [name for name, _ in pipe.module.named_parameters()]
    outputs = len(found) - len(names)
    held = [i < outputs or names[i - outputs] in mine for i in range(len(found))]
    pipe.close()
    pairs = [pair for pair, there in zip(zip(found, expected, strict=True), held, strict=True) if there]
    return "equal" if same([ours for ours, _ in pairs], [theirs for _, theirs in pairs]) else "different"


def main() -> None:
    keep_others_apart()
    dist.init_process_group("gloo")
    said = " ".join(equal(*way) for way in WAYS)
    # Each process has a seed of its own: the first one's holds.
    torch.manual_seed(100 + dist.get_rank())
    pipe = masked(seed=None, timeout=60.0)
    masks(pipe)
    masks(pipe, train=False)
    pp.save(pipe, sys.argv[1])
    say(f"{said}\n{hash_of(masks(pipe))}\n{hash_of(masks(pipe, train=False))}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
