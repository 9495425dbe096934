"""Every fault planted in the values of an examination is named, with advice."""

import pytest
from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.core.outcome import DeviceRun, Interval, Measurement, StepTime
from trainpace.diagnose import Elsewhere, Expected
from trainpace.diagnose import health as checks
from trainpace.measure import Machine, detect
from trainpace.measure.gpus import Gpu

SOFTWARE = {
    "torch": "2.13.0",
    "accelerator": "cuda",
    "name": "NVIDIA A100-SXM4-80GB",
    "count": 1,
    "versions": {"gpu": "NVIDIA A100-SXM4-80GB", "cuda": "12.8"},
    "backend": "nccl",
    "shared_memory_gib": 62.0,
}
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", cuda="12.8", pcie_generation_max=4, pcie_width_max=16)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return replace(detect(), gpus=(A100,))


def software(machine, kind="cuda", **changed):
    return [
        check
        for check in checks.software_check({**SOFTWARE, **changed}, machine, kind)
        if check.status != "ok"
    ]


def test_healthy_installation_has_no_findings(machine):
    assert software(machine) == []


@pytest.mark.parametrize(
    ("changed", "kind", "finding", "advice"),
    [
        ({"versions": {"cuda": "13.0"}}, "cuda", "CUDA 13.0", "Update the driver"),
        ({"accelerator": None}, "cpu", "this torch sees no GPU", "build of torch for CUDA"),
        ({"count": 2, "backend": ""}, "cuda", "no library", "NCCL"),
        ({"shared_memory_gib": 1 / 16}, "cuda", "64 MiB", "--shm-size"),
    ],
)
def test_faulty_installation_gets_finding_and_advice(machine, changed, kind, finding, advice):
    (check,) = software(machine, kind, **changed)
    assert check.status == "problem"
    assert finding in check.finding
    assert advice in check.advice


def test_cpu_examination_accepts_visible_gpu(machine):
    assert software(machine, "cpu", count=1) == []


def products(device, **tflops):
    return list(checks.products_check({"tflops": tflops, "failed": {}}, device))


@pytest.mark.parametrize(
    ("device_ms", "status"), [(300, "ok"), (320, "ok"), (3.0, "problem"), (900, "problem")]
)
def test_device_and_host_clocks_must_agree(device_ms, status):
    assert checks.clock_check({"device_ms": device_ms, "host_ms": 305}).status == status


def test_matmul_throughput_is_compared_with_datasheet():
    a100 = find_device("A100")
    (fine,) = products(a100, fp32=18.0, tf32=120.0, bf16=260.0)
    assert fine.status == "ok"
    assert "bf16 260 TFLOP/s (83% of the datasheet)" in fine.finding
    (capped,) = products(a100, fp32=18.0, bf16=100.0)
    assert capped.status == "problem"
    assert "bf16" in capped.advice
    (unknown,) = products(None, fp32=0.05)
    assert "datasheet" not in unknown.finding
    (none,) = products(a100)
    assert none.status == "failed"


@pytest.mark.parametrize(
    ("device", "name", "status"),
    [
        ("A100", "bf16", "problem"),
        (None, "bf16", "note"),
        ("T4", "tf32", None),
        ("A100", "fp32", "problem"),
    ],
)
def test_failing_precision_is_a_problem_if_gpu_supports_it(device, name, status):
    """A failing precision is a problem if the GPU supports it, nothing if it does not, and a note if the GPU is unknown."""
    card = None if device is None else find_device(device)
    values = {
        "tflops": {"fp16": 200.0},
        "failed": {name: "RuntimeError: no kernel image is available"},
    }
    found = [check for check in checks.products_check(values, card) if check.part == "formats"]
    assert [check.status for check in found] == ([] if status is None else [status])
    assert all(
        f"in {name}" in check.finding and "no kernel image" in check.finding for check in found
    )


@pytest.mark.parametrize(("pinned", "status"), [(24.0, "ok"), (6.0, "problem")])
def test_copy_bandwidth_is_compared_with_pcie_slot(machine, pinned, status):
    check = checks.copies_check(
        {"to_device": 5.0, "to_host": 5.0, "to_device_pinned": pinned}, machine
    )
    assert check.status == status
    assert ("PCIe 4 x16" in check.finding) == (status == "problem")
    unknown = replace(machine, gpus=())
    assert (
        checks.copies_check(
            {"to_device": 5.0, "to_host": 5.0, "to_device_pinned": pinned}, unknown
        ).status
        == "ok"
    )


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"allocated_gib": 0.0625, "recovered": True}, "ok"),
        ({"allocated_gib": 0.0, "recovered": True}, "problem"),
        ({"allocated_gib": 4.0}, "problem"),
        ({"allocated_gib": 0.0625, "recovered": False}, "problem"),
        ({"allocated_gib": None}, "note"),
    ],
)
def test_memory_check_status_follows_measured_values(values, status):
    assert checks.memory_check(values, 0.0625).status == status


def measured(median_ms: float) -> Measurement:
    return Measurement(
        model="resnet18",
        device="NVIDIA A100-SXM4-80GB",
        execution=Execution(micro_batch=64),
        step_times_ms=(median_ms,) * 9,
        warmup_ms=(),
        step=StepTime(
            forward_ms=median_ms / 3,
            backward_ms=median_ms / 2,
            optimizer_ms=median_ms / 6,
            idle_ms=0.0,
        ),
        median_ms=median_ms,
        interval_ms=Interval(low=median_ms, high=median_ms, coverage=0.9, basis=""),
        peak_memory_gib=None,
        reserved_memory_gib=None,
        losses=(),
        environment={},
    )


@pytest.mark.parametrize(
    ("ms", "status", "speed"),
    [(20.0, "ok", "100%"), (10.0, "ok", "200%"), (50.0, "problem", "40%")],
)
def test_reference_step_is_compared_with_forecast_interval(ms, status, speed):
    expected = Expected(
        step_ms=20.0, interval_ms=Interval(low=16.0, high=25.0, coverage=0.9, basis="")
    )
    (check,) = checks.step_check(measured(ms), expected)
    assert check.status == status
    assert speed in check.finding
    (alone,) = checks.step_check(measured(ms), None)
    assert alone.status == "ok"


@pytest.mark.parametrize(
    ("rate", "status", "said"), [(337.0, "ok", "9.5 times"), (8000.0, "note", "0.4 times")]
)
def test_reference_step_is_compared_with_published_throughput(rate, status, said):
    other = Elsewhere(
        model="ResNet18",
        batch=64,
        samples_per_second=rate,
        source="PROFET",
        differences=("fp32 instead of torch_fp32",),
    )
    _, check = checks.step_check(measured(20.0), Expected(step_ms=20.0, elsewhere=(other,)))
    assert (check.part, check.status) == ("others", status)
    assert "runs at 3,200 samples/s" in check.finding
    assert said in check.finding
    assert "fp32 instead of torch_fp32" in check.finding


def test_throttling_during_reference_step_is_a_note():
    capped = DeviceRun(
        sm_mhz=1095,
        sm_mhz_low=1095,
        sm_mhz_high=1095,
        sm_mhz_max=1410,
        held_by=("its power limit",),
    )
    _, clocks = checks.step_check(replace(measured(20.0), run=capped), None)
    assert "its power limit" in clocks.finding
    assert clocks.status == "note"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"gpu_problem": "Driver/library version mismatch", "gpus": ()},
            "Driver/library version mismatch.",
        ),
        ({"gpu_problem": "GPU 1: GPU is lost"}, "GPU 1: GPU is lost."),
        ({"gpus": (A100, Gpu(name=None))}, "GPU 1 gives no figures."),
    ],
)
def test_broken_driver_is_a_problem(machine, changed, said):
    (driver,) = (
        check
        for check in checks.machine_checks(replace(machine, **changed))
        if check.part == "driver"
    )
    assert driver.status == "problem"
    assert driver.finding.endswith(said)
    assert "nvidia-smi" in driver.advice
    assert not any(check.part == "driver" for check in checks.machine_checks(machine))


def test_driver_limits_are_notes():
    capped = replace(
        A100,
        power_limit_w=150.0,
        power_limit_default_w=400.0,
        throttled_by=("the power limit",),
        other_processes=2,
    )
    told = " ".join(
        check.finding
        for check in checks.machine_checks(replace(detect(), gpus=(capped,), load_average=0.0))
    )
    for words in ("limited to 150 W", "held down by the power limit", "2 other programs use"):
        assert words in told
