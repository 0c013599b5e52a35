"""What splitting a backward costs: CPU time of F, I, W of a stage over that of F, B; less is better, 1.00 is free.

Both ways alternate in one process, and their gradients are compared before any time counts. `gpt` is compute-bound;
`tiny` is nothing but overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from ppdsl.runtime.stages.splitting import Splitter


class Block(nn.Module):
    """A causal transformer block, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


@dataclass(frozen=True)
class Work:
    """A stage of four blocks, and how often it runs."""

    name: str
    width: int
    heads: int
    length: int
    rows: int
    rounds: int


WORK = (Work("gpt", 256, 8, 128, 2, 25), Work("tiny", 32, 4, 8, 1, 300))


def main() -> None:
    """Print the ratio for each workload, with its middle half."""
    torch.set_num_threads(1)
    print(f"CPU time of F+I+W over F+B, one stage of four blocks, torch {torch.__version__}")
    for work in WORK:
        low, middle, high, micro = measure(work)
        print(f"  {work.name:<5} {middle:5.3f}  [{low:5.3f} - {high:5.3f}]  F+B {micro:8.0f} us")


def measure(work: Work) -> tuple[float, float, float, float]:
    """Return quartiles of the ratio, and the median microseconds of F+B."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(Block(work.width, work.heads) for _ in range(4)))
    x = torch.randn(work.rows, work.length, work.width)
    gradient, splitter = torch.ones_like(x), Splitter(print)

    def whole() -> torch.Tensor | None:
        leaf = x.detach().requires_grad_(True)
        torch.autograd.backward([get_gradient_edge(stage(leaf))], [gradient])
        return leaf.grad

    def split() -> torch.Tensor | None:
        leaf = x.detach().requires_grad_(True)
        (found,), later = splitter.input_gradients([get_gradient_edge(stage(leaf))], [gradient], [leaf])
        if later is not None:
            splitter.weight_gradients(later)
        return found

    check(stage, whole, split)
    ratios, times = [], []
    for _ in range(work.rounds):
        one, two = seconds(whole), seconds(split)
        ratios.append(two / one)
        times.append(one)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high, statistics.median(times) * 1e6


def check(stage: nn.Module, *ways: Callable[[], torch.Tensor | None]) -> None:
    """Stop when the ways do not give the same bits, also after the first time."""
    results = []
    for way in ways:
        for _ in range(2):
            stage.zero_grad()
            results.append([way(), *(parameter.grad for parameter in stage.parameters())])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            if one is None or two is None or not torch.equal(one, two):
                raise SystemExit("the gradients differ")


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
