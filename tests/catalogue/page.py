"""The page of all findings, made from the examples; `GOLDEN=write pytest tests/catalogue` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.catalogue.running import PREAMBLE, Example, read_examples
from tests.catalogue.specs import SpecExample, spec_examples

__all__ = ["PAGE", "page_text"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "diagnostics.md"
_NOT_RUN = "<!-- not run: tests/catalogue runs it and compares what is said below -->"
_HEAD = """\
# Findings by code

Everything that ppdsl can report, with an example of each. A finding has a code, one whole sentence, the place where
there is one, and what to type instead where that is known. Errors are raised as children of `PpdslError`, which carry
their findings in `diagnostics`; warnings are in `graph.warnings`, or are given as `PpdslWarning`. On the command line
findings go to standard error, and `--format json` writes each as one JSON object on one line.

The Python examples begin with this:
"""


def page_text() -> str:
    """Return the page."""
    lines = [_HEAD, _NOT_RUN, "```python", "import torch", "from torch import nn", "", "import ppdsl as pp", ""]
    lines += [PREAMBLE.rstrip(), "```", "", "`pp.cli(...)` stands for a command line, given the files beside it."]
    lines += ["Specs are shown as files; those that need a model are held against the one that is named.", ""]
    examples = {example.code: example for example in read_examples()}
    specs = spec_examples()
    for code in sorted({*examples, *specs}):
        lines += [f"## {code}", ""]
        if code in examples:
            lines += _python(examples[code])
        if code in specs:
            lines += _spec(specs[code])
    return "\n".join(lines).rstrip() + "\n"


def _python(example: Example) -> list[str]:
    if example.left_out is not None:
        return [f"{example.left_out[0].upper()}{example.left_out[1:]}.", ""]
    script = [_NOT_RUN, "```python", example.script.strip(), "```"]
    return [*script, "", "```text", example.said, "```", ""]


def _spec(example: SpecExample) -> list[str]:
    model = [] if example.model is None else [f"With the model `{example.model}`:", ""]
    return [*model, "```ppspec", example.text.strip("\n"), "```", "", "```text", example.said.strip("\n"), "```", ""]
