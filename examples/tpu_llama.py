"""A Llama of Hugging Face, unchanged, on the XLA devices of this process: a stage or more on each of them.

PJRT_DEVICE=TPU python examples/tpu_llama.py                                            on one TPU host
PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 XLA_THREAD_POOL_SIZE=16 python examples/tpu_llama.py  anywhere, to try it
python examples/tpu_llama.py --help                      layers, width, schedule, micro-batches, bfloat16, a text
ppdsl graph --model examples/tpu_llama.py:make           its stages, without a device

Needs torch 2.9, torch_xla 2.9 and transformers: pip install 'ppdsl[xla,models]'
"""

import argparse
import contextlib
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import ppdsl as pp
from ppdsl.report.timeline import render_timeline

WARM_UP = 2  # steps in which programs are compiled


def read_options(arguments=None):
    parser = argparse.ArgumentParser(description="Train a Llama on the XLA devices of this process.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--stages", type=int, help="at least one for each device; as many as devices, or twice for "
                        "schedules that go round (interleaved_1f1b, zbv)")  # fmt: skip
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="in a micro-batch")
    parser.add_argument("--length", type=int, default=16, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--transport", choices=("auto", "permute", "host"), default="auto")
    parser.add_argument("--text", type=Path, help="train on the bytes of a file instead of rows that count up")
    parser.add_argument("--save", type=Path, help="folder for the checkpoint; otherwise it is thrown away")
    return parser.parse_args(arguments)


# ---------------------------------------------------------------- model, data, loss: nothing here knows of XLA


def llama(options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.width, intermediate_size=2 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=options.length, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation="eager",  # torch_xla's autocast leaves scaled_dot_product_attention alone
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mark(model, stages):
    """Divide the layers; the embedding goes with the first ones, norm and head with the last."""
    layers = model.model.layers
    for stage in range(1, stages):
        pp.begin(layers[stage * len(layers) // stages], stage)


def batches(options, steps, seed=1):
    """Rows that count up, each from a byte of its own in strides of its own; or pieces of a text."""
    chance = torch.Generator().manual_seed(seed)
    rows = options.rows * options.microbatches
    text = torch.tensor(list(options.text.read_bytes())) if options.text else None
    for _ in range(steps):
        if text is not None:
            yield text[
                torch.randint(len(text) - options.length, (rows, 1), generator=chance) + torch.arange(options.length)
            ]
        else:
            start, stride = torch.randint(64, (2, rows, 1), generator=chance)
            yield (start + (1 + stride % 2) * torch.arange(options.length)) % 64


def next_byte(output, tokens):
    return cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make(options=None, stages=4):
    """The marked model and one micro-batch."""
    options = options or read_options([])
    model = llama(options)
    mark(model, stages)
    tokens = next(batches(options, 1))[: options.rows]
    return {"model": model, "kwargs": {"input_ids": tokens}, "targets": (tokens,), "loss": next_byte}


# ---------------------------------------------------------------- training on the devices


def count_devices():
    """How many there are; this starts torch_xla, which has to come before the first backward of the process."""
    from torch_xla import runtime

    return runtime.addressable_device_count()


def autocast(options):
    return torch.autocast("xla", torch.bfloat16) if options.bf16 else contextlib.nullcontext()


def build(options, devices):
    """The pipeline: at least one stage for each device, neighbours on one device."""
    rounds = 2 if options.schedule.startswith(("interleaved", "zbv")) else 1
    stages = options.stages or max(devices, 2) * rounds
    if not devices <= stages <= options.layers:
        raise SystemExit(
            f"{stages} stages, but there are {devices} devices to fill and {options.layers} layers to divide"
        )
    # Schedules that go round place their stages themselves.
    placement = None if rounds == 2 else {stage: stage * devices // stages for stage in range(stages)}
    return pp.pipeline(
        **make(options, stages), schedule=options.schedule, microbatches=options.microbatches, placement=placement,
        devices="xla", transport=options.transport,
    )  # fmt: skip


def train(options, pipe, optimizer):
    """Return the losses and the seconds of all steps, saying each when it is done."""
    from torch_xla.core import xla_model
    from torch_xla.debug import metrics

    losses, times = [], []
    for number, tokens in enumerate(batches(options, options.steps), 1):
        start, compiled = time.perf_counter(), metrics.counter_value("UncachedCompile") or 0
        with autocast(options):
            result = pipe.step(input_ids=tokens, targets=tokens, timeline=number == options.steps)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        xla_model.wait_device_ops()  # only to measure: nothing else makes the host wait for the optimizer
        losses.append(result.loss.item())
        times.append(time.perf_counter() - start)
        curve = "█" * round(30 * losses[-1] / losses[0])
        programs = (metrics.counter_value("UncachedCompile") or 0) - compiled
        print(
            f"step {number:2}  loss {losses[-1]:.3f}  {curve:<30}  {times[-1]:6.2f} s  {programs:2} programs compiled"
        )
    return losses, times


# ---------------------------------------------------------------- what is said about it


def show_pipeline(pipe, devices):
    from torch_xla import runtime

    transport = pipe.explain()["transport"]
    parameters = sum(parameter.numel() for parameter in pipe.module.parameters())
    print(f"devices    {devices} {runtime.device_type()}: {', '.join(f'xla:{i}' for i in range(devices))}")
    print(f"model      {pipe}, {parameters:,} parameters")
    print(f"transport  {transport['name']}. {transport['reason']}")


def show_speed(options, times):
    """Say what was measured, and over what: it holds for this machine and this size."""
    if timed := times[WARM_UP:]:
        speed = options.rows * options.microbatches * options.length * len(timed) / sum(timed)
        print(f"speed      {speed:,.0f} tokens/s, measured over the last {len(timed)} of {len(times)} steps")


def compare_with_the_cpu(options, pipe, optimizer, folder):
    """Save, load into the plain model on the CPU, and compare the loss of a batch that neither has seen."""
    pp.save(pipe, folder, optimizer)
    (unseen,) = batches(options, 1, seed=2)
    ours = pipe.evaluate(input_ids=unseen, targets=unseen).loss.item()
    plain = llama(options)
    pp.load(plain, folder)
    with torch.no_grad():
        theirs = next_byte(plain(input_ids=unseen), unseen).item()
    print(f"unseen     loss {ours:.3f} on the devices, {theirs:.3f} from the checkpoint in the plain model on the CPU")


def main(arguments=None):
    options = read_options(arguments)
    devices = count_devices()
    pipe = build(options, devices)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.lr)
    show_pipeline(pipe, devices)
    losses, times = train(options, pipe, optimizer)
    for warning in (*pipe.explain()["warnings"], *pipe.explain()["xla"]):
        print(f"warning    {warning}")
    columns = shutil.get_terminal_size((100, 24)).columns
    print(render_timeline(pipe.timeline(), width=columns, title="the last step").plain)
    show_speed(options, times)
    with tempfile.TemporaryDirectory() as folder:
        compare_with_the_cpu(options, pipe, optimizer, options.save or folder)
    return losses


if __name__ == "__main__":
    losses = main()
