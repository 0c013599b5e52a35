"""Other pipelines of one's own choice beside ppdsl, in the same processes; run by `bench_peers.py`.

As one process: torchgpipe and fairscale. By torchrun, two processes: DeepSpeed. Gradients are compared with the unsplit
model's before any time counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.benchmarks.contenders import Ours, Pure, compare, gather, gradients_of
from tests.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["main"]

MICROBATCHES = 8
_STAGES = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the row as JSON to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["torchgpipe", "fairscale", "deepspeed"], required=True)
    parser.add_argument("--workload", choices=["tiny", "gpt"], required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = WORKLOADS[options.workload]
    if options.peer == "deepspeed":
        row = between_processes(work, options.seconds)
    else:
        row = in_one_process(work, options.peer, options.seconds)
    if row is not None:
        options.out.write_text(json.dumps({"peer": options.peer, "workload": work.name, **row}), encoding="utf-8")


def in_one_process(work: Workload, peer: str, seconds: float) -> dict[str, Any]:
    """Return steps over the plain loop's, of ppdsl and of `peer`, two stages each, GPipe, on the CPU."""
    if peer == "torchgpipe":
        from torchgpipe import GPipe as Pipe
    else:
        from fairscale.nn import Pipe
    model, plain = work.model(_STAGES), work.model(_STAGES)
    parts: Any = [part.run for part in work.parts(model)]
    pipe = Pipe(
        nn.Sequential(*parts), [1] * _STAGES, devices=["cpu"] * _STAGES, chunks=MICROBATCHES, checkpoint="never"
    )
    ours = Ours(work, "gpipe", _STAGES, MICROBATCHES, _STAGES)
    x, y = work.data(MICROBATCHES)
    pieces = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))

    def theirs() -> None:
        work.loss(pipe(x), y).backward()

    def loop() -> None:
        for piece, wanted in pieces:
            (work.loss(plain(piece), wanted) / MICROBATCHES).backward()

    wanted = gradients_of(work, _STAGES, MICROBATCHES)
    ways: dict[str, tuple[Callable[[], None], Mapping[str, Tensor]]] = {
        "ours": (ours.step, ours.parameters),
        "theirs": (theirs, dict(model.named_parameters())),
        "plain": (loop, dict(plain.named_parameters())),
    }
    taken = _samples(ways, wanted, seconds, lambda: None)
    return _row(taken, actions=2 * MICROBATCHES * _STAGES)


def between_processes(work: Workload, seconds: float) -> dict[str, Any] | None:
    """Return steps over the computation alone, of ppdsl and of DeepSpeed, 1F1B, each with a step of SGD; on rank 0."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    # Its start builds a shared-memory reduction that no pipeline uses, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), verbose=False)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = work.model(ranks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: Any = [part.run for part in work.parts(model)]
    net = PipelineModule(parts, num_stages=ranks, loss_fn=work.loss, partition_method="uniform")
    optimizer = _Keeping(net.parameters(), lr=0.0)
    settings = {
        "train_batch_size": work.rows * MICROBATCHES, "train_micro_batch_size_per_gpu": work.rows,
        "gradient_accumulation_steps": MICROBATCHES, "gradient_clipping": 0.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 0},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    x, y = work.data(MICROBATCHES)
    data = itertools.cycle(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
    ours = Ours(work, "1f1b", ranks, MICROBATCHES, ranks)
    ours_optimizer = torch.optim.SGD(ours.parameters.values(), lr=0.0)
    pure = Pure(work, ranks, MICROBATCHES, tuple(range(ranks)), rank)

    def step() -> None:
        ours.step()
        ours_optimizer.step()

    def theirs() -> None:
        engine.train_batch(data)

    wanted = gradients_of(work, ranks, MICROBATCHES)
    theirs()
    optimizer.kept = {}
    theirs()
    compare("deepspeed", {names[id(p)]: optimizer.kept.get(id(p)) for p in net.parameters()}, wanted)
    optimizer.kept = None
    ways: dict[str, tuple[Callable[[], None], Mapping[str, Tensor]]] = {
        "ours": (step, ours.parameters), "theirs": (theirs, {}), "plain": (pure.step, {}),
    }  # fmt: skip
    taken = _samples(ways, wanted, seconds, dist.barrier)
    row = _row(taken, actions=2 * MICROBATCHES * ranks)
    ours.pipe.close()
    return row if rank == 0 else None


class _Keeping(torch.optim.SGD):
    """Keeps the gradients it was handed, when asked to: the engine clears them before anybody else can look."""

    kept: dict[int, Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.kept is not None:
            parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            self.kept = {id(p): p.grad.clone() for p in parameters}
        return super().step(closure)


def _samples(
    ways: Mapping[str, tuple[Callable[[], None], Mapping[str, Tensor]]],
    wanted: Mapping[str, Tensor],
    seconds: float,
    together: Callable[[], object],
) -> dict[str, list[tuple[float, float]]]:
    """Return wall and CPU seconds of all calls of all ways, which take turns."""
    for name, (run, parameters) in ways.items():
        run()
        compare(name, {key: p.grad for key, p in parameters.items()}, wanted)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    began, number = time.monotonic(), 0
    while True:
        for name in list(ways)[:: 1 if number % 2 else -1]:
            run, parameters = ways[name]
            for parameter in parameters.values():
                parameter.grad = None
            together()
            cpu, start = time.process_time(), time.perf_counter()
            run()
            together()
            taken[name].append((time.perf_counter() - start, time.process_time() - cpu))
        number += 1
        if max(gather(time.monotonic() - began)) > seconds:
            return taken


def _row(taken: Mapping[str, Sequence[tuple[float, float]]], actions: int) -> dict[str, Any]:
    everybody = {name: list(zip(*gather(list(samples)), strict=True)) for name, samples in taken.items()}
    wall = {name: [max(w for w, _ in sample) for sample in samples] for name, samples in everybody.items()}
    cpu = {name: [sum(c for _, c in sample) for sample in samples] for name, samples in everybody.items()}
    row: dict[str, Any] = {"samples": len(wall["plain"]), "load": round(os.getloadavg()[0], 1)}
    for name in ("ours", "theirs"):
        row[name] = {
            "over_plain": median(a / b for a, b in zip(wall[name], wall["plain"], strict=True)),
            "cpu_over_plain": median(a / b for a, b in zip(cpu[name], cpu["plain"], strict=True)),
            "overhead_us": median((a - b) / actions * 1e6 for a, b in zip(cpu[name], cpu["plain"], strict=True)),
        }
    row["to_peer"] = median(a / b for a, b in zip(wall["ours"], wall["theirs"], strict=True))
    row["cpu_to_peer"] = median(a / b for a, b in zip(cpu["ours"], cpu["theirs"], strict=True))
    return row


if __name__ == "__main__":
    main()
