"""What a mark costs outside a recording; the promise is less than 1 microsecond."""

from __future__ import annotations

import timeit

SETUP = """
import ppdsl as pp
x = object()
pp.stage, pp.cutpoint
decorated = pp.stage(1)(lambda: None)
"""

CALLS = {
    "with pp.stage(1): pass": "with pp.stage(1): pass",
    "pp.cutpoint(x)": "pp.cutpoint(x)",
    "a function decorated with pp.stage(1)": "decorated()",
}


def main() -> None:
    """Print the time of each mark: the best of several runs, which other processes disturb least."""
    print("marks outside a recording, best of 7")
    for label, statement in CALLS.items():
        timer = timeit.Timer(statement, SETUP)
        count, _ = timer.autorange()
        print(f"  {label:<40} {min(timer.repeat(7, count)) / count * 1e9:7.0f} ns")


if __name__ == "__main__":
    main()
