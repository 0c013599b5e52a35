"""A command, run in this process, and what it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdsl.cli import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = "ppdsl.demo:make"
GOOD = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"

MODELS = '''\
"""Models in every form in which --model takes them, and in forms in which it does not."""

import torch
from torch import nn

from helper import WIDTH
from ppdsl.annotate import stage


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale=1.0):
        with stage("a"):
            x = self.first(x)
        with stage("b"):
            return (self.second(x) * scale).square().mean()


def pair():
    return Net(), (torch.randn(4, WIDTH),)


def single():
    return Net(), torch.randn(4, WIDTH)


def triple():
    return Net(), (torch.randn(4, WIDTH),), {"scale": 2.0}


def mapping():
    return {"model": Net(), "args": (torch.randn(4, WIDTH),), "kwargs": {"scale": 2.0}}


def bare():
    return Net()


def misspelt():
    return {"model": Net(), "arguments": ()}


def not_a_model():
    return 3, ()


def broken():
    raise ZeroDivisionError("in the user's own code")


VALUE = 3
'''


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
