"""Two simulated hosts train the same model; when the way between them is cut, both say so.

Each host is a network namespace; the link between them is a virtual cable.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.hosts import possible_way
from tests.runtime.launch import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.current]

WORKER = Path(__file__).with_name("hosts_worker.py")


def test_two_hosts_train_like_the_plain_model_and_both_report_a_cut_link(tmp_path: Path) -> None:
    way, reason = possible_way()
    if way is None:
        pytest.skip(f"no network namespaces here: {reason}")
    command = [*way, sys.executable, "-m", "tests.runtime.hosts", str(WORKER), str(tmp_path), "200"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=260, check=False)
    logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("log-*")))
    assert done.returncode == 0, done.stderr + logs
    assert (tmp_path / "done-0").exists(), done.stderr + logs
    first, second = ((tmp_path / f"said-{rank}").read_text() for rank in range(2))
    assert first == (
        "equal: True\n"
        "RunError: error[timed-out]: Rank 0 waited 5 seconds for rank 1 in vain "
        "(gradient of `cut`, stage 1 to 0, micro-batch 2).\n"
        "help: rank 1 hangs, or needs longer than timeout= allows\n"
        "in time\n"
        "equal: True\n"
        "RunError: error[rank-missing]: Rank 1 did not come to step 6 within 5 seconds; rank 0 waits there.\n"
        "help: all ranks must make the same calls, for the same number of batches; timeout= sets the wait\n"
        "in time"
    )
    # The second host is the one that is cut off from the store.
    assert second == (
        "equal: True\n"
        "RunError: error[timed-out]: Rank 1 waited 5 seconds for rank 0 in vain "
        "(forward of `cut`, stage 0 to 1, micro-batch 2).\n"
        "help: rank 0 hangs, or the way to it is cut; the store of torch.distributed is lost, too\n"
        "in time\n"
        "equal: True\n"
        "RunError: error[store-lost]: The store of torch.distributed gave no answer within 5 seconds; "
        "rank 1 noticed before step 6.\n"
        "help: it lives in rank 0, or in the torchrun of the first node when that started the ranks: it hangs, or the "
        "way is cut\n"
        "in time"
    )
    assert (tmp_path / "ended").exists(), "a process did not end"
