"""Run the Python examples of one page in order, in one namespace: ``python tests/docs/run_page.py PAGE``.

A block with ``>>>`` must print what it shows (``...`` stands for anything); a block without must run.
"""

from __future__ import annotations

import doctest
import linecache
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.docs.pages import Block, blocks

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(block: Block, namespace: dict[str, Any]) -> bool:
    """Run one block; print what went wrong and return whether all was well."""
    name = f"{block.page}:{block.line}"
    if ">>>" in block.text:
        test = doctest.DocTestParser().get_doctest(block.text, namespace, name, str(block.page), block.line - 1)
        test.globs = namespace  # the page's own, not a copy: blocks go on where the one before stopped
        return doctest.DocTestRunner(optionflags=FLAGS).run(test, clear_globs=False).failed == 0
    # As if the block stood alone in a file with the lines of the page: error messages then show the page's text.
    linecache.cache[name] = (len(block.text), None, block.text.splitlines(keepends=True), name)
    try:
        exec(compile(block.text, name, "exec"), namespace)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return False
    return True


def main(page: Path) -> int:
    """Run a page; the exit status is 1 when an example failed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    results = [run(block, namespace) for block in blocks(page) if block.language == "python" and block.run]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
