"""A GPT whose first and last layer share one matrix: cut with `pp.cutpoint`, the tie is found and kept by ppdsl.

python examples/04_tied_gpt.py                                          one process, four virtual ranks
torchrun --standalone --nproc-per-node 4 examples/04_tied_gpt.py        four processes; the matrix is on two of them
ppdsl graph --model examples/04_tied_gpt.py:make                        names the tie
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ppdsl as pp

BLOCKS, WIDTH, LENGTH, WORDS = 4, 16, 12, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.mix(self.before(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.feed(self.between(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight  # one matrix, used in the first and in the last stage

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            if i > 0:
                x = pp.cutpoint(x)  # what runs from here on belongs to the next stage
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(scores, tokens):
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps, rows):
    """Texts that count up, each from a word of its own."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start, stride = torch.randint(WORDS, (2, rows, 1), generator=chance)
        yield (start + (1 + stride % 2) * torch.arange(LENGTH)) % WORDS


def make(rows=2):
    """The model and one micro-batch."""
    torch.manual_seed(0)
    (tokens,) = batches(1, rows)
    return {"model": GPT().double(), "args": (tokens,), "loss": next_token_loss, "targets": (tokens,)}


def placement(ranks):
    """As many stages on each rank, neighbours together."""
    return {stage: stage * ranks // BLOCKS for stage in range(BLOCKS)}


def train(ranks=BLOCKS, steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=2), microbatches=microbatches, placement=placement(ranks))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(steps, rows=2 * microbatches):
        result = pipe.step(tokens, targets=tokens)  # also sums the gradients of the two uses of the matrix
        optimizer.step()
        optimizer.zero_grad()
        losses.append(result.loss.item())
    return losses


def main():
    torch.set_num_threads(1)  # for tensors this small more threads are slower
    if "RANK" not in os.environ:
        losses, rank = train(), 0
    else:  # started by torchrun: this process is one rank
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        losses, rank = train(dist.get_world_size()), dist.get_rank()
        dist.destroy_process_group()
    if rank == 0:
        for step, loss in enumerate(losses, 1):
            print(f"step {step}  loss {loss:.6f}")
    return losses


if __name__ == "__main__":
    losses = main()
