"""Specs of the small models, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.spec_models.nets import Branches, Chain, Rotated, Skip, TiedChain, Twice, tokens, vectors

__all__ = ["CASES", "SpecCase", "gradient_error"]


@dataclass(frozen=True)
class SpecCase:
    """A model, a spec of it, a micro-batch and a loss."""

    kind: type[nn.Module]
    spec: str
    example: Callable[[], Tensor]
    labels: str
    edges: str

    @property
    def targets(self) -> Tensor:
        """Targets of one micro-batch."""
        given = self.example()
        return given.roll(1, 1) if given.dtype == torch.int64 else given.flip(-1)

    @staticmethod
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of words, squared error of numbers."""
        if targets.dtype == torch.int64:
            return F.cross_entropy(output.flatten(0, 1), targets.flatten())
        return F.mse_loss(output, targets)


CASES = {
    "chain": SpecCase(
        Chain,
        "pipeline chain { microbatches = 4 stage embed @ 0 { embed } "
        "split h[*] into 2 by flops as block[i] @ i stage head @ 1 { norm, head } expect stages == 4 }",
        tokens,
        "embed block[0] block[1] head",
        "block[0]>block[1] block[1]>head embed>block[0]",
    ),
    "tied": SpecCase(
        TiedChain,
        "pipeline tied { microbatches = 2 stage a @ 0 { embed, h[:2] } stage b @ 1 { rest } "
        "tie head.weight = embed.weight }",
        tokens,
        "a b",
        "a>b",
    ),
    "branches": SpecCase(
        Branches,
        "pipeline branches { microbatches = 2 stage stem @ 0 { stem } stage left @ 0 { left } "
        "stage right @ 1 { right } stage join @ 1 { join } expect edges stem -> {left, right} -> join }",
        vectors,
        "stem left right join",
        "left>join right>join stem>left,right",
    ),
    "skip": SpecCase(
        Skip,
        "pipeline skip { microbatches = 2 stage down @ 0 { } "
        "cut before middle as middle @ 1 cut after middle as up @ 0 }",
        vectors,
        "down middle up",
        "down>middle,up middle>up",
    ),
    "twice": SpecCase(
        Twice,
        "pipeline twice { microbatches = 2 "
        "stage a @ 0 { first, call(block, 0) } stage b @ 1 { call(block, 1), last } }",
        vectors,
        "a b",
        "a>b",
    ),
    "rotated": SpecCase(
        Rotated,
        "pipeline rotated { microbatches = 4 schedule = gpipe "
        "split embed, layers[*], head into 2 by params as part[i] @ i replicate rotary }",
        tokens,
        "part[0] part[1]",
        "part[0]>part[1]",
    ),
}


def gradient_error(found: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference of a gradient, relative to the largest number in it."""
    worst = 0.0
    for (name, one), (_, two) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        if one.grad is None or two.grad is None:
            assert one.grad is two.grad, name
            continue
        scale = float(two.grad.abs().max()) or 1.0
        worst = max(worst, float((one.grad - two.grad).abs().max()) / scale)
    return worst
