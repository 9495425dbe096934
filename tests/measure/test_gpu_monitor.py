"""GPU monitor: clocks, power and energy during steps, read from a stand-in for NVML with the real signatures."""

import importlib.util
import inspect
import time
from pathlib import Path

import pynvml
import pytest
from msgspec.structs import replace

from trainpace.core.outcome import DeviceRun
from trainpace.core.stats import has_settled
from trainpace.measure import GpuMonitor, clock_in_words, run_in_words

FOLDER = Path(__file__).parent / "nvml"


@pytest.fixture
def nvml():
    spec = importlib.util.spec_from_file_location("nvml_stand_in", FOLDER / "pynvml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(nvml, seconds=0.5, steps=10):
    monitor = GpuMonitor("sim", nvml)
    with monitor:
        time.sleep(seconds)
    return monitor.run_of(steps, DeviceRun(settled=True))


def energy_of_half_a_second(nvml):
    """Return (DeviceRun of ten steps at 300 W, upper bound of their energy). Sleeping takes longer on a busy machine."""
    begin = time.perf_counter()
    run = watched(nvml)
    return run, 300 * (time.perf_counter() - begin) / 10


def test_fake_nvml_matches_pynvml_signatures(nvml):
    functions = [
        name
        for name, value in vars(nvml).items()
        if name.startswith("nvml") and inspect.isfunction(value)
    ]
    assert len(functions) > 10
    for name in functions:
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
        assert list(inspect.signature(getattr(nvml, name)).parameters) == list(real.parameters), (
            name
        )
    for name in ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU"):
        assert getattr(nvml, name) == getattr(pynvml, name)
    for name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
        assert issubclass(getattr(pynvml, name), pynvml.NVMLError)


def test_gpu_at_full_clock_has_power_energy_and_no_warning(nvml):
    run, most_j = energy_of_half_a_second(nvml)
    assert (run.sm_mhz, run.sm_mhz_low, run.sm_mhz_high, run.sm_mhz_max) == (1410, 1410, 1410, 1410)
    assert (run.sm_mhz_before, run.sm_mhz_after, run.held_by) == (1410, 1410, ())
    assert run.power_w == pytest.approx(300)
    assert 0.99 * 15 <= run.energy_j <= 1.01 * most_j
    assert run.energy_source == "counter"
    assert run.settled
    assert clock_in_words(run) == ""


def test_energy_is_integrated_from_power_without_counter(nvml, monkeypatch):
    monkeypatch.setenv("SIM_NVML_ENERGY", "none")
    run, most_j = energy_of_half_a_second(nvml)
    assert 0.99 * 15 <= run.energy_j <= most_j
    assert run.energy_source == "power"


def test_short_runs_have_no_energy(nvml):
    run = watched(nvml, seconds=0.1)
    assert run.energy_j is None
    assert run.power_w == pytest.approx(300)


@pytest.mark.parametrize(
    ("mhz", "reasons", "said"),
    [
        ("1095", "0x4", "its power limit: 1,095 MHz of 1,410"),
        ("1395", "0x20", "its temperature: 1,395 MHz of 1,410"),
        ("1410", "0x1", ""),  # idle, which limits nothing
        ("1095", "0", "locked"),
        ("1380,1410", "0", ""),
        ("1320,1410", "0", "between 1,320 and 1,410 MHz"),
    ],
)
def test_throttled_locked_and_varying_clocks_are_described(nvml, monkeypatch, mhz, reasons, said):
    monkeypatch.setenv("SIM_NVML_MHZ", mhz)
    monkeypatch.setenv("SIM_NVML_REASONS", reasons)
    words = clock_in_words(watched(nvml, seconds=0.3))
    assert said in words
    assert bool(words) == bool(said)


@pytest.mark.parametrize("broken", ["init", "calls", "queries"])
def test_broken_nvml_leaves_run_unchanged(nvml, monkeypatch, broken):
    monkeypatch.setenv("SIM_NVML_BROKEN", broken)
    assert watched(nvml, seconds=0.1) == DeviceRun(settled=True)


def test_driver_failure_during_run_leaves_power_unknown(nvml, monkeypatch):
    monitor = GpuMonitor("sim", nvml)
    with monitor:
        monkeypatch.setenv("SIM_NVML_BROKEN", "queries")
        time.sleep(0.45)
    run = monitor.run_of(10, DeviceRun())
    assert (run.energy_j, run.power_w, run.sm_mhz_before) == (None, None, 1410)


@pytest.mark.parametrize("uuid", ["", "of another kind"])
def test_unknown_device_is_not_sampled(nvml, uuid):
    monitor = GpuMonitor(uuid, nvml)
    with monitor:
        pass
    assert monitor.run_of(10, DeviceRun(settled=False)) == DeviceRun(settled=False)


def test_monitor_without_driver_prints_nothing(capfd):
    monitor = GpuMonitor("sim")
    with monitor:
        pass
    assert monitor.run_of(1, DeviceRun()) == DeviceRun()
    assert capfd.readouterr() == ("", "")


def test_warm_up_settles_when_two_windows_agree():
    assert has_settled([90, 30, 20.1, 20, 20, 20.2, 20, 20], 3, 0.02)
    assert not has_settled([90, 30, 22, 20, 20, 20], 3, 0.02)
    assert not has_settled([20, 20, 20, 20, 20], 3, 0.02)  # not two windows yet
    assert has_settled([20] * 6, 3, 0.02)
    assert not has_settled([20, 20, 20, 21, 21, 21], 3, 0.02)  # slower counts as well


def test_device_run_is_described_in_words():
    run = DeviceRun(settled=True, launch_ms=18.2, busy_share=0.45, power_w=312.4, energy_j=8.71)
    busy, power = run_in_words(run)
    assert "45%" in busy
    assert "312 W, 8.71 J" in power
    assert "not settled" in run_in_words(replace(run, settled=False))[0]
    assert run_in_words(DeviceRun(settled=True, launch_ms=3, busy_share=0.97)) == []
    assert run_in_words(DeviceRun()) == []
