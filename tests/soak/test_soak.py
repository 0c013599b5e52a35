"""A minute of it; `PPDSL_SOAK_SEED` chooses another one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.runtime.launch import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.current]


def test_a_minute_of_random_models_schedules_delays_and_faults_finds_nothing() -> None:
    seed = os.environ.get("PPDSL_SOAK_SEED", "1")
    command = [sys.executable, "-m", "tests.soak", "--minutes", "1", "--ranks", "2", "4", "--seed", seed]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "problems: 0" in done.stdout
