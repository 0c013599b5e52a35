"""Which chains of stages may run as one circular program, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ppdsl as pp
from ppdsl.diagnostics import GraphError
from ppdsl.recording.record import record_call
from ppdsl.runtime.xla.spmd_stages import EqualStages, equal_stages

WIDTH = 6


class Block(nn.Module):
    """A layer with a residual."""

    def __init__(self, width: int = WIDTH, hidden: int = 8, slope: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.slope = slope

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.slope


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            with pp.stage(number):
                x = block(x)
        return x


def stages_of(model: nn.Module, *args: torch.Tensor) -> EqualStages:
    return equal_stages(record_call(model, args or (torch.randn(2, WIDTH),)))


def test_equal_stages_are_one_program_with_the_weights_of_each() -> None:
    torch.manual_seed(0)
    model = Chain(*(Block() for _ in range(3))).double()
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    stages = stages_of(model, x)
    assert stages.count == 3
    assert stages.names["blocks.0.up.weight"] == tuple(f"blocks.{i}.up.weight" for i in range(3))
    assert stages.trained == set(stages.names)
    own = dict(model.named_parameters())
    weights = {name: torch.stack([own[each] for each in names]) for name, names in stages.names.items()}
    torch.testing.assert_close(stages.run_all(weights, stages.example)[-1], model(x), rtol=1e-12, atol=1e-12)


def test_several_blocks_make_a_stage_and_frozen_weights_and_buffers_are_stacked_too() -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(()))
            self.up.weight.requires_grad_(False)

        def forward(self, x):
            return super().forward(x) * self.scale

    model = Chain(*(nn.Sequential(Scaled(), Scaled()) for _ in range(2)))
    stages = stages_of(model)
    assert stages.names["blocks.0.1.scale"] == ("blocks.0.1.scale", "blocks.1.1.scale")
    assert "blocks.0.1.scale" not in stages.trained
    assert "blocks.0.0.up.weight" not in stages.trained
    assert "blocks.0.0.down.weight" in stages.trained


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        with pp.stage(0):
            first = self.blocks[0](x)
        with pp.stage(1):
            second = self.blocks[1](first)
        with pp.stage(2):
            return self.blocks[2](second) + first


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask):
        for number, block in enumerate(self.blocks):
            with pp.stage(number):
                x = block(x) * mask
        return x


def tied() -> nn.Module:
    model = Chain(Block(), Block())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def frozen() -> nn.Module:
    model = Chain(Block(), Block())
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def activated(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation)


class Unbatched(nn.Module):
    """Writes into a tensor that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + torch.zeros(WIDTH).add_(self.weight)


REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "one stage": (lambda: Chain(Block()), 1, "there is only one stage"),
    "a skip": (Skip, 1, "blocks.0 goes from stage 0 to 1, 2, and only neighbours may be connected"),
    "a mask": (Masked, 2, "input mask goes to stages 0, 1"),
    "a tie": (tied, 1, "blocks.0.up.weight = blocks.1.up.weight is used in stages 0, 1"),
    "running statistics": (
        lambda: Chain(*(nn.Sequential(nn.BatchNorm1d(WIDTH)) for _ in range(2))),
        1,
        "stage 0 changes what a BatchNorm1d remembers",
    ),
    "dropout": (lambda: Chain(*(activated(nn.Dropout()) for _ in range(2))), 1, "stage 0 draws random numbers"),
    "another width inside": (
        lambda: Chain(Block(hidden=8), Block(hidden=9)),
        1,
        "blocks.1.up.weight is float32[9, 6], and blocks.0.up.weight is float32[8, 6]",
    ),
    "another width between": (
        lambda: Chain(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)),
        1,
        "stage 0 gives float32[2, 5], and the first stage takes float32[2, 6]",
    ),
    "more weights": (
        lambda: Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)),
        1,
        "stage 1 has 1 tensor, and the first stage 2",
    ),
    "frozen in one": (frozen, 1, "blocks.1.up.weight is frozen, and blocks.0.up.weight is not"),
    "another module": (lambda: Chain(activated(nn.Tanh()), activated(nn.ReLU())), 1, "stage 1 runs "),
    "a number on a module": (lambda: Chain(Block(), Block(slope=1.01)), 1, "gives other numbers than stage 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_chains_are_refused_with_the_reason(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, words = REFUSED[name]
    with pytest.raises(GraphError) as caught:
        stages_of(make(), *(torch.randn(2, WIDTH) for _ in range(inputs)))
    (told,) = caught.value.diagnostics
    assert told.code == "stages-differ"
    assert words in told.message
    assert told.help is not None


def test_a_stage_that_torch_cannot_batch_is_refused_with_torch_s_words() -> None:
    with pytest.raises(GraphError, match=r"stages-not-batched\]: A stage cannot be batched"):
        stages_of(Chain(Unbatched(), Unbatched()))
