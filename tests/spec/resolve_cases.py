"""One spec for each finding of `resolve`: what its messages are checked with, and what the reference shows."""

from __future__ import annotations

from dataclasses import dataclass

from ppdsl.graph.outline import ModelOutline
from tests.spec.outlines import Net, chain, towers

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A spec and the model it does not fit.

    Attributes:
        code: Of the finding that it shows.
        body: The statements of the spec.
        model: Name of the model in `MODELS`.
    """

    code: str
    body: str
    model: str = "gpt"

    @property
    def outline(self) -> ModelOutline:
        """The model."""
        return MODELS[self.model]


def looped() -> ModelOutline:
    """`block` is called twice, with `other` between."""
    net = Net("Looped")
    for name in ("block", "other", "head"):
        net.module(name, "Block", count=4)
    net.run("head", net.run("block", net.run("other", net.run("block", flops=4), flops=4), flops=4), flops=4)
    return net.outline()


def rotary(parameters: int = 0, op: str = "cos") -> ModelOutline:
    """`rotary` is called once in the model, `layers.0` and `layers.1` use what it makes; `unused` is never called."""
    net = Net("Rotary")
    net.module("rotary", "Rotary", count=parameters)
    for at in range(2):
        net.module(f"layers.{at}", "Layer", count=4)
    net.module("unused", "Linear", count=4)
    net.module("drop", "Dropout")
    table = net.run("rotary", op=op)
    x = net.run("layers.0", table, flops=4)
    net.run("layers.1", net.run("drop", x, op="dropout"), table, flops=4)
    return net.outline()


def gates() -> ModelOutline:
    """`a`, then the cutpoint `middle`, then `b` and `c`."""
    net = Net("Gates")
    for name in "abc":
        net.module(name, count=4)
    x = net.run("a")
    net.cutpoint("middle")
    net.run("c", net.run("b", x))
    return net.outline()


MODELS = {
    "gpt": chain(),
    "looped": looped(),
    "rotary": rotary(),
    "learned rotary": rotary(4),
    "gates": gates(),
    "towers": towers(),
}

GPT = "stage a { transformer.wte, transformer.h[0:6] }\nstage b { rest }\n"

CASES = (
    Case("no-match", "stage head { lm_head }\nstage tail { transformer.h[12], transformer.ln_f }"),
    Case("no-match", "stage a { transformer.h[6:13] }\nstage b { rest }"),
    Case("no-match", "stage a { tranformer.h[0] }\nstage b { rest }"),
    Case("no-match", "stage a { h[0] }\nstage b { rest }"),
    Case("no-match", "stage a { transformer.ln_f[0] }\nstage b { rest }"),
    Case("no-match", "stage a { transformer.*.atn }\nstage b { rest }"),
    Case("no-match", "stage a { type(Blok) }\nstage b { rest }"),
    Case("no-match", "stage a { /h\\.\\d+/ }\nstage b { rest }"),
    Case("no-match", "stage a { a }\ncut at midle as b", "gates"),
    Case("no-match", GPT + "tie lm_hed.weight = transformer.wte.weight"),
    Case("empty-slice", "stage a { transformer.h[-3:3] }\nstage b { rest }"),
    Case("empty-selection", "stage a { transformer.h[3] - transformer.h[*] }\nstage b { rest }"),
    Case("removes-nothing", "stage a { transformer.h[0:3] - transformer.h[5] }\nstage b { rest }"),
    Case("no-such-call", "stage a { call(block, 2) }\nstage b { rest }", "looped"),
    Case(
        "claimed-twice",
        "stage a { transformer.wte, transformer.h[0:6] }\nstage b { transformer.h[5:12] }\nstage c { rest }",
    ),
    Case("claimed-twice", "stage a { lm_head }\nstage b { lm_head }\nstage c { rest }"),
    Case("claimed-twice", "stage a { call(block, 1) }\nstage b { call(block, 1) }\nstage c { rest }", "looped"),
    Case("claimed-twice", "stage a { rest }\nstage b { rest }"),
    Case("unclaimed-parameter", "stage a { transformer.wte, transformer.h[0:6] }\nstage b { transformer.h[6:11] }"),
    Case("empty-stage", "stage a { unused }\nstage b { rest }", "rotary"),
    Case("empty-stage", "stage a { transformer.h }\nstage b { transformer.h[*] }\nstage c { rest }"),
    Case("empty-stage", "stage a { transformer, lm_head }\nstage b { rest }"),
    Case("never-called", "stage a { layers[0], unused }\nstage b { rest }", "rotary"),
    Case("never-called", "stage a { rest }\ncut before unused as b", "rotary"),
    Case("unknown-rank", "ranks = 4\nstage a @ 0 { transformer.wte }\nstage b @ 9 { rest }"),
    Case("idle-ranks", "ranks = 4\nstage a @ 0 { transformer.wte }\nstage b @ 2 { rest }"),
    Case("order-contradicts", "stage b { b, c }\nstage a { a }", "gates"),
    Case("visited-twice", "stage a { block }\nstage b { rest }", "looped"),
    Case("cuts-out-of-order", "cut before c as late\ncut before b as early", "gates"),
    Case("cuts-out-of-order", "cut before b as one\ncut after a as two", "gates"),
    Case("not-one-place", "cut before transformer.h[*] as b"),
    Case("not-divisible", "split call(block, 0) into 2 by count as p[i]\nstage b { rest }", "looped"),
    Case("too-many-parts", "split transformer.h[0:3] into 4 by count as p[i]\nstage b { rest }"),
    Case("no-costs", "split transformer.h[*] into 4 by time as p[i]\nstage b { rest }"),
    Case("branches-joined", "split text[*], image[*], join into 2 by count as p[i]", "towers"),
    Case("does-not-fit", "memory = 200B\nsplit transformer.h[*] into 4 by flops as p[i]\nstage b { rest }"),
    Case(
        "does-not-fit",
        "memory = 1900B\nstage a @ 0 { transformer.wte, transformer.h[*], transformer.ln_f }\nstage b @ 1 { lm_head }",
    ),
    Case(
        "does-not-fit",
        "memory = 900B\nstage a @ 0 { transformer.wte }\n"
        "split transformer.h[*] into 2 by flops as p[i] @ i\nstage b { rest }",
    ),
    Case("cannot-replicate", "replicate rotary\nstage a { layers[0] }\nstage b { rest }", "learned rotary"),
    Case("cannot-replicate", "replicate drop\nstage a { rotary, layers[0] }\nstage b { rest }", "rotary"),
    Case("not-tied", GPT + "tie lm_head.weight = transformer.ln_f.weight"),
    Case(
        "tie-apart",
        "stage a @ 0 { transformer.wte }\nstage b @ 1 { rest }\ntie lm_head.weight = transformer.wte.weight colocate",
    ),
    Case("unknown-stage", GPT + "expect params(hea) <= 4"),
)
