"""`ppdsl doctor`: each check by what it finds, and the command as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppdsl.cli.doctor import draw_checks, examine
from ppdsl.runtime.inspection import cpu as inspecting_cpu
from ppdsl.runtime.inspection import cuda as inspecting_cuda
from ppdsl.runtime.inspection import xla as inspecting_xla
from ppdsl.runtime.inspection import xla_environment as environment
from ppdsl.runtime.inspection.bounded import lines_of_module
from ppdsl.runtime.inspection.run import Check, Status
from ppdsl.runtime.xla import adapter
from ppdsl.runtime.xla.collectives.testing import Verdict
from tests.cli.running import run

# ---------------------------------------------------------------- the command


def test_a_machine_is_looked_at_and_the_findings_are_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, out, err = run(capsys, "doctor", "--device", "cpu", "--width", 100)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "ppdsl doctor: cpu"
    assert [line.split()[1] for line in lines[1:6]] == ["ppdsl", "torch", "cores", "OMP_NUM_THREADS", "gloo"]
    assert lines[-1].startswith("no failures, ")


def test_a_failure_is_exit_code_1_and_json_has_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    code, out, _ = run(capsys, "doctor", "--device", "xla", "--format", "json")
    told = json.loads(out)
    assert (code, told["device"], told["ok"]) == (1, "xla", False)
    last = told["checks"][-1]
    assert last["status"] == "fail"
    assert last["remedy"].startswith("set PJRT_DEVICE=TPU") or "pip install" in last["remedy"]


def test_what_takes_too_long_is_ended_and_reported() -> None:
    *_, last = examine("cpu", 0.05)
    assert (last.name, last.status) == ("examination", Status.FAIL)
    assert "it did not end within 0.05 seconds" in last.found


def test_a_check_that_ends_the_process_is_reported_with_the_check_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(*_: object, quote: bool) -> Iterator[str]:
        yield Check("devices", Status.OK, "xla:0 to xla:3").to_json()
        yield "ended: it was ended by SIGABRT"

    monkeypatch.setattr("ppdsl.cli.doctor.lines_of_module", lines)
    assert examine("xla", 1)[-1].found == "broke off after 'devices': it was ended by SIGABRT"


def test_every_line_is_drawn_as_its_golden_text() -> None:
    checks = [
        Check("torch_xla", Status.OK, "2.9.0, with torch 2.9.0"),
        Check("XLA_THREAD_POOL_SIZE", Status.FAIL, "not set, so 2, the number of cores: fewer than devices", "set it"),
        Check("permute", Status.WARN, "send and recv do not work on these devices", "say transport='all_reduce'"),
    ]
    assert draw_checks("xla", checks, width=60).plain == (
        "ppdsl doctor: xla\n"
        "ok    torch_xla             2.9.0, with torch 2.9.0\n"
        "fail  XLA_THREAD_POOL_SIZE  not set, so 2, the number of\n"
        "                            cores: fewer than devices\n"
        "                            help: set it\n"
        "warn  permute               send and recv do not work on\n"
        "                            these devices\n"
        "                            help: say transport='all_reduce'\n"
        "1 failure, 1 warning"
    )


# ---------------------------------------------------------------- cpu and cuda


def test_threads_that_nobody_set_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = inspecting_cpu._threads(8)
    assert threads.status == Status.WARN
    assert f"every process takes {torch.get_num_threads()} threads" in threads.found
    assert inspecting_cpu._threads(1).status == Status.OK


def test_a_torch_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [check.status for check in inspecting_cuda.checks()] == [Status.OK, Status.FAIL]


def test_cuda_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *_, last = inspecting_cuda.checks()
    assert (last.status, last.found) == (Status.FAIL, "torch is built for CUDA 12.8, and finds no device")


@pytest.mark.gpu
def test_cuda_devices_are_put_to_work() -> None:
    found = {check.name: check for check in examine("cuda", 120)}
    assert found["cuda:0"].status == Status.OK
    assert "free" in found["cuda:0"].found
    assert "NCCL" in found


# ---------------------------------------------------------------- xla


def test_a_torch_that_torch_xla_does_not_support_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "versions", lambda: ("2.13.0", "2.9.0"))
    (only,) = inspecting_xla.checks()
    assert only.found == "torch_xla 2.9.0 was built for torch 2.9, and torch is 2.13.0"
    assert only.remedy == "pip install 'torch==2.9.*' 'torch_xla==2.9.*'"


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Stand in for torch_xla with four devices."""
    monkeypatch.setattr(adapter, "versions", lambda: ("2.9.0", "2.9.0"))
    monkeypatch.setattr(adapter, "device_count", lambda: 4)
    monkeypatch.setattr(adapter, "replica_count", lambda: 4)
    monkeypatch.setattr(adapter, "device_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(adapter, "host_copy", torch.Tensor.detach)
    monkeypatch.setattr(inspecting_xla, "self_test", lambda: [Verdict("collective_permute", passed=True)])
    monkeypatch.setattr(environment, "tpu_chips", lambda: 0)
    for name in [name for name in os.environ if name.startswith(("CPU_NUM", "XLA_", "LIBTPU_", "TPU_", "PJRT_"))]:
        monkeypatch.delenv(name)
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    return monkeypatch


def found() -> dict[str, Check]:
    return {check.name: check for check in inspecting_xla.checks()}


def test_the_launch_barrier_of_a_tpu_has_to_be_off(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "TPU")
    flag = "--xla_tpu_use_enhanced_launch_barrier"
    for arguments, status in (("", "warn"), (f"{flag}=true", "fail"), (f"--other {flag}=false", "ok")):
        four_devices.setenv("LIBTPU_INIT_ARGS", arguments)
        assert found()["LIBTPU_INIT_ARGS"].status == status
    assert "CPU_NUM_DEVICES" not in found()


def test_fewer_threads_than_devices_are_a_failure(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    for size, status in (("3", "fail"), ("4", "ok")):
        four_devices.setenv("XLA_THREAD_POOL_SIZE", size)
        assert found()["XLA_THREAD_POOL_SIZE"].status == status
    assert found()["CPU_NUM_DEVICES"].found == "not set"


def test_a_process_in_spmd_mode_shows_one_device(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setenv("XLA_USE_SPMD", "1")
    assert found()["XLA_USE_SPMD"].status == Status.FAIL


def test_a_runtime_that_does_not_start_is_told_in_its_own_words(four_devices: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("The TPU is already in use by process 7\nand a trace")

    four_devices.setenv("PJRT_DEVICE", "TPU")
    four_devices.setattr(adapter, "device_count", broken)
    assert found()["devices"].found == "The TPU is already in use by process 7"


def test_without_permute_the_host_transport_is_named(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setenv("XLA_THREAD_POOL_SIZE", "4")
    verdicts = [Verdict("collective_permute", passed=False, reason="result 0 is wrong"), Verdict("send", passed=True)]
    four_devices.setattr(inspecting_xla, "self_test", lambda: verdicts)
    assert found()["transport permute"].status == Status.WARN
    assert found()["transport permute"].remedy == "pipelines use the host transport meanwhile"
    assert found()["collectives"].found == "collective_permute: result 0 is wrong"


def test_devices_of_other_processes_are_told(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "TPU")
    four_devices.setattr(adapter, "replica_count", lambda: 8)
    assert "drives 4 of 8 devices" in found()["transport permute"].found


def test_a_single_device_is_no_pipeline(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setattr(adapter, "device_count", lambda: 1)
    assert (found()["devices"].status, found()["devices"].remedy) == (Status.WARN, "set CPU_NUM_DEVICES=4")


def test_what_torch_xla_lacks_for_a_tpu_is_named_before_it_starts(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "TPU")
    four_devices.setattr(adapter, "device_count", None)
    four_devices.setenv("TPU_LIBRARY_PATH", "no/such/file")
    assert found()["libtpu"].found == "TPU_LIBRARY_PATH is no/such/file, and no such file is there"
    four_devices.delenv("TPU_LIBRARY_PATH")
    four_devices.setattr("importlib.util.find_spec", lambda _: None)
    assert found()["libtpu"].remedy == "pip install 'torch_xla[tpu]==2.9.*'"


@pytest.mark.parametrize(
    ("kind", "chips", "status", "remedy"),
    [
        ("", 0, "fail", "set PJRT_DEVICE=TPU, or PJRT_DEVICE=CPU to try (CPU_NUM_DEVICES=4 XLA_THREAD_POOL_SIZE=16)"),
        ("", 4, "fail", "set PJRT_DEVICE=TPU"),
        ("tpu", 4, "fail", "set PJRT_DEVICE=TPU"),
        ("NEURON", 0, "warn", "set it to TPU or CPU"),
        ("CPU", 4, "warn", "set PJRT_DEVICE=TPU to use them"),
        ("CPU", 0, "ok", ""),
        ("TPU", 4, "ok", ""),
    ],
)
def test_the_kind_of_device_fits_the_machine(
    kind: str, chips: int, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", kind)
    told = environment.pjrt_device(chips)
    assert (told.status, told.remedy) == (status, remedy)


def test_chips_are_counted_by_what_is_plugged_in(tmp_path: Path) -> None:
    plugged = [("0x1ae0", "0x120000"), ("0x1ae0", "0x020000"), ("0x8086", "0x120000"), ("0x1ae0", "0x088000")]
    for number, (vendor, kind) in enumerate(plugged):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "empty").mkdir()
    assert environment.tpu_chips(tmp_path) == 2
    assert environment.tpu_chips(tmp_path / "none") == 0


@pytest.mark.parametrize("name", ["CPU_NUM_DEVICES", "XLA_THREAD_POOL_SIZE"])
@pytest.mark.parametrize("value", ["four", "0", "-1"])
def test_a_number_that_is_none_is_a_failure_before_torch_xla_starts(
    name: str, value: str, four_devices: pytest.MonkeyPatch
) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setattr(adapter, "device_count", None)
    four_devices.setenv(name, value)
    assert (found()[name].status, found()[name].found) == (Status.FAIL, f"{value} is no number above 0")


def test_what_is_known_to_hang_is_not_tried(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setenv("XLA_THREAD_POOL_SIZE", "3")
    four_devices.setattr(inspecting_xla, "self_test", None)
    permute = found()["transport permute"]
    assert permute.status == Status.WARN
    assert permute.found == "not tested: with fewer threads than devices it would hang, and collectives too"
    four_devices.setattr(adapter, "device_count", lambda: 1)
    four_devices.setattr(adapter, "replica_count", lambda: 1)
    assert found()["transport permute"].found == "there is one device, so nothing travels"


def test_variables_that_change_every_program_are_told(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setenv("XLA_USE_BF16", "1")
    four_devices.setenv("XLA_USE_32BIT_LONG", "0")
    four_devices.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/there")
    told = found()
    assert told["XLA_USE_BF16"].status == Status.WARN
    assert told["XLA_USE_BF16"].remedy == "unset it, and use torch.autocast('xla', torch.bfloat16)"
    assert "XLA_USE_32BIT_LONG" not in told
    assert told["XLA_FLAGS"].found == "--xla_dump_to=/tmp/there"


def test_variables_of_a_tpu_are_shown(four_devices: pytest.MonkeyPatch) -> None:
    four_devices.setenv("PJRT_DEVICE", "TPU")
    four_devices.setenv("TPU_VISIBLE_CHIPS", "0,1")
    four_devices.setenv("XLA_TPU_MAX_INFLIGHT_COMPUTATIONS", "64")
    told = found()
    assert told["TPU_VISIBLE_CHIPS"].found == "0,1"
    assert told["XLA_TPU_MAX_INFLIGHT_COMPUTATIONS"].found == "64"
    assert "TPU_PROCESS_BOUNDS" not in told


def test_gradients_written_in_place_hold_up_devices_of_the_cpu(four_devices: pytest.MonkeyPatch) -> None:
    name = "XLA_ENABLE_PARAM_ALIASING"
    four_devices.setenv("PJRT_DEVICE", "CPU")
    four_devices.setenv("XLA_THREAD_POOL_SIZE", "4")
    four_devices.setenv(name, "0")
    assert name not in found()
    four_devices.setenv(name, "1")
    assert (found()[name].status, found()[name].remedy) == (Status.WARN, "set it to 0, or leave it to ppdsl")


# ---------------------------------------------------------------- what ends the process


def test_the_words_of_a_process_that_broke_off_are_quoted_on_request() -> None:
    given = ("ppdsl.runtime.inspection.run", ["nothing"], 60)
    *_, plain = lines_of_module(*given)
    *_, quoted = lines_of_module(*given, quote=True)
    assert plain == "ended: it ended with exit status 1"
    assert quoted == f"{plain}: ModuleNotFoundError: No module named 'ppdsl.runtime.inspection.nothing'"
