"""Encoder and decoder: two inputs enter at different stages, and both decoder stages read the encoder's result.

python examples/05_encoder_decoder.py                                          one process, four virtual ranks
torchrun --standalone --nproc-per-node 4 examples/05_encoder_decoder.py        four processes
ppdsl graph --model examples/05_encoder_decoder.py:make                        which value goes where
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ppdsl as pp

WORDS, WIDTH, LENGTH, PAD = 12, 16, 8, 0
KEYS = ["encoder 0", "encoder 1", "decoder 0", "decoder 1"]
LAYER = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.write = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**LAYER) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**LAYER) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source, written):
        with pp.stage("encoder 0"):
            padding = source.eq(PAD)  # cheap: each of the four stages gets `source` and makes its own
            memory = self.encoder[0](self.read(source) + self.position, src_key_padding_mask=padding)
        with pp.stage("encoder 1"):
            memory = self.encoder[1](memory, src_key_padding_mask=padding)
        with pp.stage("decoder 0"):  # `written` enters here, and only this stage's rank needs it
            later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=written.device).triu(1)
            x = self.write(written) + self.position
            x = self.decoder[0](x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        with pp.stage("decoder 1"):
            x = self.decoder[1](x, memory, tgt_mask=later, memory_key_padding_mask=padding)
            return self.head(x)


def batches(steps, rows):
    """Sentences with padding at the end; the translation is the sentence backwards."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        source = torch.randint(1, WORDS, (rows, LENGTH), generator=chance)
        length = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=chance)
        source = source.masked_fill(torch.arange(LENGTH) >= length, PAD)
        target = source.flip(1)
        yield source, F.pad(target[:, :-1], (1, 0), value=PAD), target


def make(rows=2):
    """The model and one micro-batch."""
    torch.manual_seed(0)
    ((source, written, target),) = batches(1, rows)
    model = Translator().double()
    return {"model": model, "args": (source, written), "loss": token_loss, "targets": (target,)}


def token_loss(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def placement(ranks):
    """As many stages on each rank: with two ranks, the encoder on one and the decoder on the other."""
    return {key: i * ranks // len(KEYS) for i, key in enumerate(KEYS)}


def train(ranks=len(KEYS), steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=2), microbatches=microbatches, placement=placement(ranks))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for source, written, target in batches(steps, rows=2 * microbatches):
        result = pipe.step(source, written, targets=target)
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
