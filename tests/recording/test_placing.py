"""Stage programs on another device than the one they were recorded on; `meta` stands for any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ppdsl as pp
from ppdsl.recording.placing import place_program
from ppdsl.recording.record import record_call

TABLE = torch.arange(4.0)


class TakesTheDeviceOfATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with pp.stage(0):
            h = self.a(x) + torch.arange(4, device=x.device)
        with pp.stage(1):
            mask = torch.ones(x.shape[0], 4, device=h.device).tril()
            return self.b(h * mask).to(h.device) + TABLE.to(h.device)


def on(device: str) -> tuple[Any, list[Tensor]]:
    model = TakesTheDeviceOfATensor()
    recording = record_call(model, (torch.randn(3, 4),))
    model.to(device)
    for program in recording.programs:
        place_program(program, torch.device(device))
    h, *_ = recording.programs[0](torch.randn(3, 4, device=device))
    return recording, [h, *recording.programs[1](h)]


def test_devices_taken_from_tensors_stand_for_the_device_of_the_stage() -> None:
    _, tensors = on("meta")
    assert [tensor.device.type for tensor in tensors] == ["meta", "meta"]


def test_a_program_can_be_placed_again() -> None:
    recording, _ = on("meta")
    recording.model.to_empty(device="cpu")
    for program in recording.programs:
        place_program(program, torch.device("cpu"))
    h, *_ = recording.programs[0](torch.randn(3, 4))
    assert h.device.type == "cpu"


def test_a_program_on_the_recorded_device_stays_as_it_is() -> None:
    recording = record_call(TakesTheDeviceOfATensor(), (torch.randn(3, 4),))
    before = [program.module.code for program in recording.programs]
    for program in recording.programs:
        place_program(program, torch.device("cpu"))
    assert [program.module.code for program in recording.programs] == before
