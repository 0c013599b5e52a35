"""How long `import ppdsl` takes in a fresh process, beside `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 7


def seconds(source: str) -> float:
    """Return the median time of fresh processes that run `source`."""
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", source], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Print each import's time over that of an empty process."""
    empty = seconds("pass")
    print(f"imports, median of {RUNS} fresh processes, without Python's own start ({empty * 1e3:.0f} ms)")
    for source in ("import ppdsl", "import ppdsl, ppdsl.cli", "import torch", "import ppdsl; ppdsl.record"):
        print(f"  {source:<30} {(seconds(source) - empty) * 1e3:7.0f} ms")


if __name__ == "__main__":
    main()
