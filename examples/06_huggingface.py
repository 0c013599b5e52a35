"""An unchanged Hugging Face model: marked from outside, its own loss, called with keyword arguments.

python examples/06_huggingface.py                                          one process, four virtual ranks
torchrun --standalone --nproc-per-node 4 examples/06_huggingface.py        four processes
ppdsl graph --model examples/06_huggingface.py:make                        Llama as four stages

Needs transformers: pip install 'ppdsl[models]'
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ppdsl as pp

STAGES, WORDS, LENGTH = 4, 24, 12


def mark(model):
    """From the call of every second block on, a new stage begins; what comes before is stage 0."""
    for stage in range(1, STAGES):
        pp.begin(model.model.layers[2 * stage], stage)


def batches(steps, rows):
    """Texts that count up, each from a word of its own."""
    chance = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start, stride = torch.randint(WORDS, (2, rows, 1), generator=chance)
        yield (start + (1 + stride % 2) * torch.arange(LENGTH)) % WORDS


def make(rows=2):
    """The model and one micro-batch; the loss is in the model's own output."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, hidden_size=16, intermediate_size=32, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    mark(model)
    (tokens,) = batches(1, rows)
    return {"model": model, "args": (), "kwargs": {"input_ids": tokens, "labels": tokens}}


def placement(ranks):
    """As many stages on each rank, neighbours together."""
    return {stage: stage * ranks // STAGES for stage in range(STAGES)}


def train(ranks=STAGES, steps=5, microbatches=8):
    pipe = pp.pipeline(**make(rows=2), microbatches=microbatches, placement=placement(ranks))
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for tokens in batches(steps, rows=2 * microbatches):
        result = pipe.step(input_ids=tokens, labels=tokens)
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
