"""`trainpace doctor` as a real command, on this machine and on broken ones."""

import subprocess
import sys

import pytest
import torch

from trainpace import measure as accelerator
from trainpace import verbs
from trainpace.core.errors import UserCodeError
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.core.outcome import Interval, Measurement, StepTime
from trainpace.diagnose import Check, examine, health
from trainpace.diagnose import health_probes as parts
from trainpace.measure import detect
from trainpace.measure.gpus import detect_gpus
from trainpace.report import TerminalProgress, examination_json, examination_sections, page, show


def trainpace(*arguments, cwd):
    command = [sys.executable, "-m", "trainpace", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_doctor_finds_this_machine_in_order(tmp_path):
    run = trainpace("doctor", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "is in order, and measuring works on it." in run.stdout
    for part in ("torch", "products", "memory", "step", "watch", "loader", "storage"):
        assert f"\n  {part} " in run.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_missing_device_is_an_error(tmp_path):
    run = trainpace("doctor", "--device", "cuda", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.endswith(
        "this torch sees no CUDA device. Install a build of torch for CUDA, or for ROCm on an AMD GPU; or use --device cpu.\n"
    )


def test_unresponsive_driver_gives_a_problem():
    class Broken:
        class NVMLError(Exception):
            pass

        class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801
            pass

        class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801
            pass

        @classmethod
        def nvmlInit(cls):
            raise cls.NVMLError("GPU is lost")

    gpus, problem = detect_gpus(Broken)
    assert gpus == ()
    assert problem is not None


def test_failing_check_does_not_stop_others(monkeypatch, capsys, tmp_path):
    """One check raises, one hangs, one crashes; the other checks still run."""
    faults = {
        "products": "raise RuntimeError('no kernel image')",
        "loader": "import os; os.kill(os.getpid(), 11)",
        "memory": "import time; time.sleep(600)",
    }
    (tmp_path / "faulty_parts.py").write_text(
        "import json\nfrom trainpace.core.worker import serve\n"
        f"FAULTS = {faults!r}\n"
        "def work(request):\n"
        "    try:\n"
        "        exec(FAULTS.get(request['part'], ''))\n"
        "    except Exception as error:\n"
        "        return json.dumps({'error': repr(error), 'trace': 'Traceback ...'})\n"
        "    return json.dumps({'values': {'torch': '2', 'accelerator': None, 'name': '', 'count': 1, 'versions': {}, 'backend': 'gloo',\n"
        "        'shared_memory_gib': 8, 'allocated_gib': 0.0625}})\n"
        "serve(work)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(health, "PARTS_MODULE", "faulty_parts")
    monkeypatch.setattr(health, "PART_TIMEOUT_S", 4.0)
    monkeypatch.setattr(health, "_step", refuse)
    monkeypatch.setattr(
        health, "_watched", lambda kind: Check(part="watch", status="ok", finding="Fine.")
    )
    found = examine("cpu", detect(), None, lambda _: None, lambda *_: None)
    status = {check.part: check.status for check in found.checks}
    assert (status["products"], status["loader"], status["step"]) == ("failed", "failed", "failed")
    assert status["memory"] == "failed"
    assert (status["torch"], status["storage"]) == ("ok", "ok")
    (hung,) = (check for check in found.checks if check.part == "memory")
    assert "hung" in hung.finding
    assert found.traces == {"products": "Traceback ..."}
    assert not found.is_well
    show(examination_sections(found))
    said = capsys.readouterr().out
    assert "4 things to look at" in said
    assert "no kernel image" in said
    text = page("", examination_sections(found), {})
    assert "Not all is well with" in text
    assert "no kernel image" in text
    assert "Traceback ..." in text
    assert examination_json(found)["well"] is False


def test_raising_or_wrong_matmul_precisions_are_named(monkeypatch):
    def faulty(a, b):
        if a.dtype == torch.bfloat16:
            raise RuntimeError("no kernel image is available")
        return a @ b if a.dtype == torch.float32 else 1.01 * (a @ b)

    monkeypatch.setattr(torch, "matmul", faulty)
    monkeypatch.setattr(parts, "SECONDS_A_PRODUCT", 0.0)
    found = parts.products("cpu")
    assert list(found["tflops"]) == ["fp32"]  # a CPU has no TF32
    assert found["failed"] == {
        "bf16": "RuntimeError: no kernel image is available",
        "fp16": "a product is off by 1%",
    }


def test_cpu_profile_is_used_only_for_cpu_device(monkeypatch):
    """A GPU that is not in the catalog has no forecast."""

    def profile(progress):
        raise AssertionError("the CPU's profile was asked for")

    monkeypatch.setattr(verbs.places, "profile_here", profile)
    assert verbs.machine._expected(None, "cuda", None, None) is None
    with pytest.raises(AssertionError, match="was asked for"):
        verbs.machine._expected(None, "cpu", None, None)


def test_known_gpu_has_forecast_and_published_measurements():
    known = Measurement(
        model="resnet18",
        device="T4",
        execution=Execution(micro_batch=64, precision="torch_fp32", optimizer="sgd_momentum"),
        step_times_ms=(150.0,),
        warmup_ms=(),
        step=StepTime(forward_ms=150.0),
        median_ms=150.0,
        peak_memory_gib=None,
        losses=(),
        interval_ms=Interval(low=149.0, high=151.0, coverage=0.9, basis=""),
        environment={},
    )
    expected = verbs.machine._expected(known, "cuda", find_device("T4"), TerminalProgress())
    assert 50 < expected.step_ms < 500
    first = expected.elsewhere[0]
    assert (first.model, first.batch) == ("ResNet18", 64)
    assert first.samples_per_second == pytest.approx(1e3 * 64 / 189.985)


def test_crashing_torch_is_a_failed_check(monkeypatch, capsys):
    def crash(kind):
        raise UserCodeError("looking for a device gave no answer: it was ended by signal 11.")

    monkeypatch.setattr(accelerator, "device_here", crash)
    found = verbs.machine.examine_machine(verbs.machine.DoctorRequest(), TerminalProgress())
    assert [check.finding for check in found.checks if check.status == "failed"] == [
        "looking for a device gave no answer: it was ended by signal 11."
    ]
    assert not found.is_well


def test_read_only_folder_fails_only_storage_check(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", ".")

    parts = [
        ("storage", refused),
        ("torch", lambda: [Check(part="torch", status="ok", finding="Fine.")]),
    ]
    monkeypatch.setattr(health, "_parts", lambda *_: parts)
    found = examine("cpu", detect(), None, lambda _: None, lambda *_: None)
    status = {check.part: check.status for check in found.checks}
    assert (status["storage"], status["torch"]) == ("failed", "ok")


def refuse(*_):
    raise UserCodeError("the model's code raised.", "")
