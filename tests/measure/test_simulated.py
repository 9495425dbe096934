"""Real measurement code on a simulated accelerator that runs asynchronously like a GPU. It must find the planted values.

Times are compared only with planted lower bounds and with each other, so a busy machine does not matter.
`benchmarks/accelerator_faults.py` breaks the code in typical ways and expects a failure here.
"""

import json
import re
import statistics

import pytest

pytestmark = pytest.mark.slow

DEVICE = """
import time, torch
from trainpace.measure.device import *
from trainpace.measure import device_work
assert in_use() == "sim" and count_devices("sim") == 1 and count_devices("cuda") == 0
check_device("sim"); use_device("sim", 0)
assert device_name("sim") == "Test card" and versions("sim") == {"gpu": "Test card"}, versions("sim")
x = torch.ones(4, device="sim")
torch.ops.sim.work(x, 50_000.0)
start = time.perf_counter(); synchronize("sim"); assert time.perf_counter() - start > 0.04  # it waits for the device

beside = torch.Stream("sim")  # synchronizing waits for other streams as well, finishing the current one does not
with beside:
    torch.ops.sim.work(x, 400_000.0)
start = time.perf_counter(); finish_stream(); assert time.perf_counter() - start < 0.3
synchronize("sim"); assert time.perf_counter() - start > 0.3
assert driver_id("sim") == "sim"

clock = StepClock("sim")
for us in (20_000.0, 60_000.0):
    clock.start_step(); torch.ops.sim.work(x, us); clock.mark(); torch.ops.sim.work(x, us / 2); clock.mark()
assert not clock.spans_ms
clock.settle()
for (whole, half), ms in zip(clock.spans_ms, (20, 60), strict=True):
    assert 0.95 * ms < whole < 3 * ms and 0.95 * ms / 2 < half < 3 * ms, clock.spans_ms

before = torch.empty(2**24, device="sim", dtype=torch.uint8); del before
meter = MemoryMeter("sim")  # what was before it does not count
kept = torch.empty(2**22, device="sim", dtype=torch.uint8); freed = torch.empty(2**21, device="sim", dtype=torch.uint8); del freed
allocated, reserved = (gib * 1024 for gib in meter.peak_gib())
assert 6 <= allocated < 6.1 and allocated <= reserved, (allocated, reserved)
assert peak_allocated_gib("sim") * 1024 == allocated and reserved_gib("sim") > 0 and allocator_retries("sim") == 0
ended = device_work("sim")  # no profiler of torch records its kernels
assert ended is None or ended() is None
print("all of it")
"""


PROBES = """
import json, sys
from trainpace.core.records import to_jsonable
from trainpace.measure import Conditions
from trainpace.measure.steps import measure_steps
found = []
for batch, changed in json.loads(sys.argv[1]):
    conditions = Conditions(**{"model": "planted.py:task", "device": "sim", "seconds": 0.3, **changed})
    found.append(to_jsonable(measure_steps(conditions, batch)))
print(json.dumps(found))
"""


def probes(simulated, *requests, work_us="0,0", activation_mib=0, around=(), **settings):
    """Measure each (batch, changed conditions) in one process."""
    run = simulated(
        "env",
        *around,
        f"WORK_US={work_us}",
        f"ACTIVATION_MIB={activation_mib}",
        "python",
        "-c",
        PROBES,
        json.dumps(requests),
        **settings,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_simulated_device_implements_torch_functions(simulated):
    run = simulated("python", "-c", DEVICE, name="Test card")
    assert run.stdout == "all of it\n", run.stderr


def test_measure_finds_planted_times_memory_and_losses(simulated):
    small, large, accumulated, cpu = probes(
        simulated,
        (8, {}),
        (24, {}),
        (8, {"accumulation": 3}),
        (8, {"device": "cpu"}),
        work_us="1000,2500",
        activation_mib=1,
    )
    for probe, samples in ((small, 8), (large, 24), (accumulated, 24)):
        parts = probe["step"]
        assert 0.98 * 3.5 * samples < probe["median_ms"] < 1.5 * 3.5 * samples
        assert parts["forward_ms"] == pytest.approx(parts["backward_ms"] / 2.5, rel=0.25)
    assert small["device"] == "Simulated accelerator"
    peaks = [1024 * probe["peak_memory_gib"] for probe in (small, large)]
    assert peaks[1] - peaks[0] == pytest.approx(16, abs=0.5)
    assert small["reserved_memory_gib"] >= small["peak_memory_gib"]
    shared = min(len(small["losses"]), len(cpu["losses"]), 20)
    assert small["losses"][:shared] == pytest.approx(cpu["losses"][:shared], rel=1e-4)
    assert small["losses"][-1] < small["losses"][0]


def test_clocks_power_and_energy_come_from_training_gpu(simulated):
    """The training GPU is the second of the machine, and its steps have no gaps."""
    (probe,) = probes(
        simulated,
        (8, {"seconds": 1.0}),
        work_us="1000,2500",
        nvml_mhz=1095,
        nvml_reasons=0x4,
        nvml_watts=250,
        copy_gb_per_s=1,
    )
    run = probe["run"]
    assert (run["sm_mhz"], run["sm_mhz_before"], run["sm_mhz_max"], run["held_by"]) == (
        1095,
        1095,
        1410,
        ["its power limit"],
    )
    assert run["power_w"] == pytest.approx(250)
    mean_ms = statistics.fmean(probe["step_times_ms"])
    assert run["energy_j"] == pytest.approx(250 * mean_ms / 1e3, rel=0.4)
    assert run["busy_share"] is None or run["busy_share"] > 0.7


def test_slow_first_steps_count_as_warm_up(simulated):
    """Seven steps of 68 ms precede steps of 28 ms, more than one window of the warm-up."""
    (probe,) = probes(
        simulated, (8, {"seconds": 1.0}), work_us="1000,2500", around=("SLOW_STEPS=7",)
    )
    warm, timed = probe["warmup_ms"], probe["step_times_ms"]
    assert min(warm[:7]) > 60
    assert statistics.median(timed) < 0.8 * min(warm[:7])
    assert len(warm) + len(timed) == len(probe["losses"])
    # Torch has no profiler for this device.
    assert probe["run"]["busy_share"] is None


def test_launch_bound_device_has_low_busy_share(simulated):
    quick, slow = (
        probes(simulated, (8, {}), kernel_us=5, launch_us=us, copy_gb_per_s=1)[0]
        for us in (300, 2100)
    )
    # A step has at least 15 launches; kernels of 5 us hide none of them.
    assert slow["median_ms"] > max(15 * 2.1, 2 * quick["median_ms"])
    assert slow["run"]["launch_ms"] > max(15 * 2.1, 0.3 * slow["median_ms"])
    assert slow["run"]["busy_share"] is None or slow["run"]["busy_share"] < 0.3
    assert slow["run"]["power_w"] is None


def test_until_oom_finds_largest_batch_that_fits(simulated):
    run = simulated(
        "env",
        "ACTIVATION_MIB=8",
        "trainpace",
        "measure",
        "planted.py:task",
        "--device",
        "sim",
        "--batch",
        "1:4",
        "--until-oom",
        "--no-forecast",
        "--no-journal",
        "--json",
        "--seconds",
        "0ms",
        "--repeats",
        "1",
        memory_mib=28,
    )
    assert run.returncode == 0, run.stderr
    analysis = json.loads(run.stdout)["analysis"]
    assert max(point["batch"] for point in analysis["points"]) == 3
    assert {f["failure"] for f in analysis["failures"]} == {"out_of_memory"}
    assert min(f["batch"] for f in analysis["failures"]) == 4


def test_unknown_device_name_is_an_error(simulated):
    run = simulated("trainpace", "measure", "planted.py:task", "--device", "simm", "--no-journal")
    assert run.returncode == 2
    assert "unknown device 'simm'" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("work", "arguments", "settings", "part"),
    [
        ("500,1000", ("item",), {}, "waiting for the device"),
        ("0,0", (), {"copy_gb_per_s": 0.0001}, "copies to the device"),
    ],
)
def test_watch_names_largest_part_of_asynchronous_step(simulated, work, arguments, settings, part):
    script = ("python", "train.py", *arguments)
    watched = simulated(
        "env",
        f"WORK_US={work}",
        "trainpace",
        "watch",
        "--output",
        "recording",
        "--",
        *script,
        **settings,
    )
    assert watched.returncode == 0, watched.stderr
    assert "the device works asynchronously" in watched.stdout
    largest = re.search(r"the largest part is ([^(]*)", watched.stdout)
    assert largest is not None
    assert part in largest[1], watched.stdout


def test_watch_does_not_change_losses(simulated):
    plain = simulated("python", "train.py", "pinned")
    watched = simulated(
        "trainpace", "watch", "--output", "recording", "--", "python", "train.py", "pinned"
    )
    assert watched.returncode == 0, watched.stderr
    assert plain.stdout in watched.stdout  # to the last digit


@pytest.mark.long
def test_run_measures_ladder_on_simulated_device(simulated, tmp_path):
    (tmp_path / "ladder.toml").write_text(
        """task = "planted.py:task"
        device = "sim"
        [start]
        micro_batch = 8
        [job]
        samples = 10_000
        epochs = 2
        [[rung]]
        title = "accumulation"
        micro_batch = 4
        accumulation = 2
        """
    )
    run = simulated(
        "env",
        "WORK_US=1000,2500",
        "trainpace",
        "run",
        "ladder.toml",
        "--steps",
        "20",
        "--no-journal",
    )
    assert run.returncode == 1, run.stderr  # no rung helps: both do the same work
    steps_ms = [
        float(ms)
        for ms in re.findall(
            r"^(?:baseline|accumulation) +none +([\d.]+) ms", run.stdout, re.MULTILINE
        )
    ]
    # Copies from pageable memory wait for the device, which then waits for the host.
    assert len(steps_ms) == 2
    assert min(steps_ms) >= 28
    assert steps_ms[0] == pytest.approx(steps_ms[1], rel=0.3), run.stdout


@pytest.mark.long  # the one with a broken driver, which any run tries, sees most of the same
def test_doctor_examines_simulated_device(simulated, tmp_path):
    run = simulated(
        "trainpace",
        "doctor",
        "--json",
        "--html",
        "doctor.html",
        memory_mib=3000,
        copy_gb_per_s=8,
        kernel_us=10,
        nvml_mhz=1095,
        nvml_reasons=0x4,
    )
    examination = json.loads(run.stdout)
    status = {check["part"]: check["status"] for check in examination["checks"]}
    assert examination["device"] == "Simulated accelerator"
    assert {part for part, word in status.items() if word == "failed"} == set(), run.stdout
    assert {
        "torch",
        "clock",
        "products",
        "copies",
        "memory",
        "step",
        "watch",
        "loader",
        "storage",
    } <= set(status)
    assert status["memory"] == status["watch"] == "ok"
    assert status["clocks"] == "note"  # during the known step
    assert run.returncode == int(not examination["well"])
    assert "held down by its power limit" in (tmp_path / "doctor.html").read_text()


def test_doctor_reports_broken_driver_and_unsupported_precision(simulated):
    run = simulated(
        "trainpace",
        "doctor",
        memory_mib=3000,
        kernel_us=10,
        nvml_broken="init",
        no_kernels="BFloat16",
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    words = " ".join(run.stdout.split())
    assert "Driver/library version mismatch" in words
    assert "bf16 do not work here: RuntimeError: SIM error: no kernel image is available" in words
    assert "fp16" in words


def test_doctor_reports_torch_import_failure(simulated):
    run = simulated("trainpace", "doctor", library="/nowhere.so")
    assert run.returncode == 1, run.stderr
    assert "Failed to load the backend extension: sim" in " ".join(run.stdout.split())
    assert "Traceback" not in run.stdout
