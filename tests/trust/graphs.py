"""Traps in the shape of the graph: skips, branches, ties, values without a gradient, integers and masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ppdsl as pp
from tests.trust.entry import ROWS, Entry, Setup

__all__ = ["GRAPH_ENTRIES"]

WIDTH = 4
WORDS = 7


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def numbers(microbatches: int, *shape: int, seed: int = 0) -> Tensor:
    """Random numbers for a batch."""
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS * microbatches, *shape, generator=chance, dtype=torch.float64)


def tokens(microbatches: int, length: int = 3) -> Tensor:
    return torch.randint(WORDS, (ROWS * microbatches, length), generator=torch.Generator().manual_seed(1))


class Layers(nn.Module):
    """Four linear layers in double precision, always with the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.extra()
        self.double()

    def extra(self) -> None:
        """Make more modules."""


def plain(model: type[Layers]) -> object:
    """Return the setup of a model of numbers to numbers."""

    def make(microbatches: int) -> Setup:
        x, y = numbers(microbatches, WIDTH), numbers(microbatches, WIDTH, seed=1)
        return Setup(model(), (x,), targets=(y,), loss=mean_square)

    return make


class SkipToTwo(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            y = self.b(h)
        with pp.stage(2):
            y = self.c(y + h)
        with pp.stage(3):
            return self.d(y * h)


class CrossedSkips(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h0 = self.a(x)
        with pp.stage(1):
            h1 = self.b(h0)
        with pp.stage(2):
            h2 = self.c(h1 + h0)
        with pp.stage(3):
            return self.d(h2 + h1)


class Residual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = pp.cutpoint(y)
        return x + self.b(y)


class BackAgain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            h = self.c(h)
        with pp.stage(1):
            h = self.d(h)
        with pp.stage(0):
            return h.tanh()


class TokensSkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.table(words)
        with pp.stage(1):
            y = self.body(h)
        with pp.stage(2):
            return self.head(y + h.detach()) * (words[..., None] > 2)


def _words(model: type[nn.Module]) -> object:
    def make(microbatches: int) -> Setup:
        words = tokens(microbatches)
        return Setup(
            model(), (words,), targets=(words,), loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())
        )

    return make


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.table(words)
        with pp.stage(1):
            h = self.body(h).tanh()
        with pp.stage(2):
            return self.head(h)


class ThreeTies(Layers):
    """Three groups, met in opposite order by the first and the last stage, one in the middle too."""

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(self.b(self.c(x)))
        with pp.stage(1):
            h = self.b(self.d(h))
        with pp.stage(2):
            return self.c(self.b(self.a(h)))


class FrozenTie(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.table.weight.requires_grad_(False)


class TwiceOnOnePath(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(self.a(x).tanh())
        with pp.stage(1):
            return self.b(self.b(h).tanh()) + self.a(h)


class WeightOfAnother(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return F.linear(self.b(h), self.a.weight)


class PassedOn(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h, t = self.a(x), x * 2 + self.b(x)
        with pp.stage(1):
            h, t = self.c(h), t
        with pp.stage(2):
            return self.d(h) + t


class UnusedAndFrozen(Layers):
    def extra(self) -> None:
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(self.frozen(h))


class ManyKinds(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            mask = x > 0
            nothing = x.new_empty(0)
            places = torch.arange(WIDTH, device=x.device) * x.detach().sign().to(torch.int64)
            small = mask.to(torch.uint8)
            half, brain = x.detach().to(torch.float16), x.detach().to(torch.bfloat16)
            turned = torch.polar(x.detach().abs(), x.detach())
            single = x.detach().float()
            count = x.detach().sign().to(torch.int32)
        with pp.stage(1):
            h = self.b(h) * mask + nothing.sum()
        with pp.stage(2):
            h = self.c(h) + places + small + half + brain + turned.real + single + count
            return self.d(h)


class FirstTwoFrozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            h = self.c(h)
        with pp.stage(3):
            return self.d(h)


class OnlyFirstLearns(FirstTwoFrozen):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a.requires_grad_(True)


class NoParameters(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            h = F.relu(h)
        with pp.stage(2):
            return self.b(h)


class Masks(Layers):
    """A causal mask and a table made once, read by every later stage."""

    def extra(self) -> None:
        self.register_buffer("table", torch.randn(WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            mask = torch.full((WIDTH, WIDTH), 1.0, dtype=x.dtype).triu()
            scale = torch.tensor(3.0, dtype=x.dtype)
            table = self.table * 2
            h = self.a(x) @ mask
        with pp.stage(1):
            h = self.b(h) @ mask + table
        with pp.stage(2):
            return self.c(h) @ mask * scale + table


class ManyValues(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            parts = [self.a(x) * i for i in range(1, 10)]
        with pp.stage(1):
            parts = [self.b(part) for part in parts[:5]] + parts[5:]
        with pp.stage(2):
            return self.c(sum(parts) / 9)


class Transposed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
            sent = torch.stack([h, h * 2], 1).transpose(1, 2)
        with pp.stage(1):
            return self.b((sent * torch.arange(2.0, dtype=x.dtype)).sum(-1))


class ViewLeaves(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = torch.cat([self.a(x), self.b(x)], 1)
            left, right = h[:, :WIDTH], h[:, WIDTH:]
        with pp.stage(1):
            return self.c(left) * right


class InPlaceAtTheBorder(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x)
        with pp.stage(1):
            return self.b(F.relu(h * 1, inplace=True))


class Norms(Layers):
    def extra(self) -> None:
        self.norm, self.late = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.norm(self.a(x))
        with pp.stage(1):
            h = self.b(h)
        with pp.stage(2):
            return self.late(self.c(h))


GRAPH_ENTRIES = (
    Entry("skip_to_two", ("UR-001", "UR-005"), plain(SkipToTwo)),
    Entry("crossed_skips", ("UR-002",), plain(CrossedSkips)),
    Entry("residual", ("UR-004",), plain(Residual)),
    Entry("back_again", ("UR-007", "UR-009"), plain(BackAgain)),
    Entry("tokens_skip", ("UR-003", "UR-026"), _words(TokensSkip)),
    Entry("tied", ("UR-010", "UR-011"), _words(Tied)),
    Entry("three_ties", ("UR-015",), plain(ThreeTies)),
    Entry("frozen_tie", ("UR-016",), _words(FrozenTie)),
    Entry("twice_on_one_path", ("UR-012",), plain(TwiceOnOnePath)),
    Entry("weight_of_another", ("UR-097",), plain(WeightOfAnother)),
    Entry("passed_on", ("UR-019",), plain(PassedOn)),
    Entry("unused_and_frozen", ("UR-020",), plain(UnusedAndFrozen)),
    Entry("many_kinds", ("UR-021", "UR-028", "UR-030"), plain(ManyKinds)),
    Entry("first_two_frozen", ("UR-022",), plain(FirstTwoFrozen)),
    Entry("only_first_learns", ("UR-022",), plain(OnlyFirstLearns)),
    Entry("no_parameters", ("UR-023",), plain(NoParameters)),
    Entry("masks", ("UR-025", "UR-094"), plain(Masks)),
    Entry("many_values", ("UR-029",), plain(ManyValues)),
    Entry("transposed", ("UR-137",), plain(Transposed)),
    Entry("view_leaves", ("UR-128", "UR-129"), plain(ViewLeaves)),
    Entry("in_place_at_the_border", ("UR-103",), plain(InPlaceAtTheBorder)),
    Entry("norms", ("UR-123",), plain(Norms), exact=True),
)
