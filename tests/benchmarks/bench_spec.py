"""How long `ppdsl check` takes, from the start of the process: `python tests/benchmarks/bench_spec.py`.

A small spec took 0.28 s on an idle machine, nearly all of it for loading Python, rich and lark.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMALL = "param ranks = 4\npipeline net {\n    split h[*] into 8 by params as b[i] @ i % ranks\n}\n"
LARGE = "pipeline net {\n" + "".join(f"    stage s{i} @ {i % 8} {{ h[{i}], g[{i}] }}\n" for i in range(2000)) + "}\n"


def seconds(text: str, runs: int = 5) -> float:
    """The median of some runs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "net.ppspec"
        file.write_text(text)
        taken = []
        for _ in range(runs):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "ppdsl", "check", str(file)], check=True, capture_output=True)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    print(f"4 lines      {seconds(SMALL):.2f} s")
    print(f"2000 stages  {seconds(LARGE):.2f} s")
