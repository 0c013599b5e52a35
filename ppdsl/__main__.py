"""`python -m ppdsl` is the command `ppdsl`."""

from __future__ import annotations

import sys

from ppdsl.cli import main

if __name__ == "__main__":
    sys.exit(main())
