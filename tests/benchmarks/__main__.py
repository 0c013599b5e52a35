"""Runs all benchmarks, one after the other, and can write what they print to a page.

`python -m tests.benchmarks --write docs/reference/benchmarks.md`
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OTHERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "bench_peers": ("peers", {}),
    "bench_xla": ("xla", {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_THREAD_POOL_SIZE": "16"}),
}
"""Benchmarks that need another environment of pyproject.toml, and other variables."""
ORDER = (
    "bench_steps", "bench_inprocess", "bench_peers", "bench_memory", "bench_recording", "bench_schedules", "bench_spec",
    "bench_import", "bench_marks", "bench_xla",
)  # fmt: skip
HEAD = """# Benchmarks

Written by `make bench` with `--write`; a benchmark's own words say what its numbers mean. All compare within one run,
in turns: trust ratios, absolute times belong to the machine. Numbers that depend on gradients are taken only after the
gradients were found equal to the unsplit model's. What the numbers say, and what they do not:
[performance](../background/performance.md).

{machine}

To repeat one: `make bench BENCH_ARGS=bench_steps`, or another name with `bench_` before it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; the status tells whether all went through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="these only")
    parser.add_argument("--write", type=Path, help="write the page")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in ORDER]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; one of: {', '.join(ORDER)}")
    sections, failed = [], []
    load = os.getloadavg()[0]
    for name in options.names or ORDER:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        done = _run(name)
        print(done.stdout, flush=True)
        print(f"   {time.monotonic() - started:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
        sections.append(f"## {name.removeprefix('bench_')}\n\n{_words(name)}\n\n```text\n{_plain(done.stdout)}\n```\n")
    if options.write and not failed:
        page = "\n".join([HEAD.format(machine=_machine(load)), *sections])
        options.write.write_text(page.rstrip() + "\n", encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(name: str) -> subprocess.CompletedProcess[str]:
    other, variables = OTHERS.get(name, ("", {}))
    python = [sys.executable, str(ROOT / ".ci" / "environment.py"), other, "python"] if other else [sys.executable]
    return subprocess.run(
        [*python, str(HERE / f"{name}.py")],
        cwd=ROOT,
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT), "COLUMNS": "150", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )


def _words(name: str) -> str:
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    return ast.get_docstring(tree) or ""


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _machine(load: float) -> str:
    cores = os.cpu_count()
    return (
        f"{platform.system()} on {platform.machine()}, {cores} cores shared with other work, load {load:.1f} at the "
        f"start and {os.getloadavg()[0]:.1f} at the end; Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, one thread for each process."
    )


if __name__ == "__main__":
    sys.exit(main())
