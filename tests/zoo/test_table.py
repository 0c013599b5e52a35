"""The generated table says of each model how far it agrees, and why not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.zoo.harness import Finding, Status
from tests.zoo.table import merge, render

FINDINGS = {
    "2.9.0": [
        Finding("gpt", False, Status.ROUNDING, 0.5, 4, 9, 20, 3, 7.2e-8, True),
        Finding("gpt", True, Status.REFUSED, text="error[recordings-differ]: They differ.\nhelp: seed it"),
        Finding("swin", False, Status.EQUAL, 0.25, 4, 7, 0, 3, meta=True),
        Finding("swin", True, Status.EQUAL, 0.25, 4, 7, 0, 3),
        Finding("rwkv", False, Status.EQUAL, 0.75, 4, 8, 3, 3, meta=True),
        Finding("rwkv", True, Status.EQUAL, 0.75, 4, 8, 3, 3),
    ],
    "2.13.0": [
        Finding("gpt", False, Status.EQUAL, 0.4, 4, 9, 20, 3, meta=True),
        Finding("gpt", True, Status.WRONG, 0.4, 4, 9, 20, 3, text="Traceback:\nKeyError: 3"),
        Finding("swin", False, Status.SKIPPED, text="timm not installed"),
        Finding("swin", True, Status.SKIPPED, text="timm not installed"),
    ],
}


def test_each_model_has_a_row_and_each_reason_a_line() -> None:
    page = render(FINDINGS, {"2.9.0": {"transformers": "5.0", "timm": "1.0"}, "2.13.0": {"transformers": "5.0"}})
    assert (
        page[page.index("| model") :]
        == """\
| model | torch 2.13.0 eval | torch 2.13.0 train | torch 2.9.0 eval | torch 2.9.0 train |\
 meta | seconds | stages | modules | operations | edges |
|---|---|---|---|---|---|---|---|---|---|---|
| gpt | = | wrong | 7e-08 | refused | yes | 0.40 | 4 | 9 | 20 | 3 |
| swin | - | - | = | = | yes | 0.25 | 4 | 7 | 0 | 3 |

## Held out

Chosen before the recorder ran for the first time. What went wrong with them then has been repaired since, so the rows
say what works, not how likely the next unknown model is to work.

| model | torch 2.13.0 eval | torch 2.13.0 train | torch 2.9.0 eval | torch 2.9.0 train |\
 meta | seconds | stages | modules | operations | edges |
|---|---|---|---|---|---|---|---|---|---|---|
| rwkv | - | - | = | = | yes | 0.75 | 4 | 8 | 3 | 3 |

- torch 2.13.0, eval: 1 equal, 1 skipped.
- torch 2.13.0, train: 1 wrong, 1 skipped.
- torch 2.13.0 was used with transformers 5.0.
- torch 2.9.0, eval: 2 equal, 1 rounding.
- torch 2.9.0, train: 2 equal, 1 refused.
- torch 2.9.0 was used with timm 1.0, transformers 5.0.

- `gpt` in train mode is wrong (torch 2.13.0): `KeyError: 3`
- `gpt` in train mode is refused (torch 2.9.0): `error[recordings-differ]: They differ.`
- Not run: timm not installed.
"""
    )


def test_what_one_environment_skips_another_one_of_the_same_torch_may_have_run() -> None:
    vision = [
        Finding("gpt", False, Status.SKIPPED, text="no transformers"),
        Finding("swin", False, Status.EQUAL, 0.25, 4, 7, 0, 3),
    ]
    text = [
        Finding("gpt", False, Status.REFUSED, text="error[x]: y"),
        Finding("swin", False, Status.SKIPPED, text="no timm"),
    ]
    assert merge(vision, text) == [text[0], vision[1]]
    assert merge(text, vision) == [text[0], vision[1]]
