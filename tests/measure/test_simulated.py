"""The real commands on a simulated accelerator, which works beside the host as a GPU does: what was planted must be found.

`benchmarks/accelerator_faults.py` breaks the code in ways in which such code is usually wrong, and expects a failure here.
"""

import json
import re

import pytest

pytestmark = pytest.mark.slow

ROOM = """
import time, torch
from trainpace.accelerator import StepClock, MemoryMeter, device_work, check_device, count_devices, device_name, in_use, synchronize, use_device, versions
from trainpace.accelerator import allocator_retries, driver_id, finish_stream, peak_allocated_gib, reserved_gib
assert in_use() == "sim" and count_devices("sim") == 1 and count_devices("cuda") == 0
check_device("sim"); use_device("sim", 0)
assert device_name("sim") == "Test card" and versions("sim") == {"gpu": "Test card"}, versions("sim")
x = torch.ones(4, device="sim")
torch.ops.sim.work(x, 50_000.0)
start = time.perf_counter(); synchronize("sim"); assert time.perf_counter() - start > 0.04  # it waits for the device

beside = torch.Stream("sim")  # synchronising waits for other streams as well, finishing the current one does not
with beside:
    torch.ops.sim.work(x, 80_000.0)
start = time.perf_counter(); finish_stream(); assert time.perf_counter() - start < 0.04
synchronize("sim"); assert time.perf_counter() - start > 0.06
assert driver_id("sim") == "sim"

clock = StepClock("sim")
for us in (20_000.0, 60_000.0):
    clock.start_step(); torch.ops.sim.work(x, us); clock.mark(); torch.ops.sim.work(x, us / 2); clock.mark()
assert not clock.spans_ms
clock.settle()
for (whole, half), ms in zip(clock.spans_ms, (20, 60), strict=True):
    assert abs(whole - ms) < 0.05 * ms and abs(half - ms / 2) < 0.05 * ms, clock.spans_ms

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


def measured(simulated, folder, *options, work_us="0,0", activation_mib=0, around=(), **settings):
    run = simulated(
        "env",
        *around,
        f"WORK_US={work_us}",
        f"ACTIVATION_MIB={activation_mib}",
        "trainpace",
        "measure",
        "planted.py:task",
        "--device",
        "sim",
        "--no-forecast",
        "--no-journal",
        "--output",
        "measured.json",
        "--seconds",
        "500ms",
        *options,
        **settings,
    )
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "measured.json").read_text())


def test_the_room(simulated):
    run = simulated("python", "-c", ROOM, name="Test card")
    assert run.stdout == "all of it\n", run.stderr


def test_planted_step_times(simulated, tmp_path):
    for probe in measured(
        simulated, tmp_path, "--batch", "8,16", "--repeats", "1", work_us="1000,2500"
    ):
        samples = probe["execution"]["micro_batch"]
        assert probe["median_ms"] == pytest.approx(3.5 * samples, rel=0.02)
        assert probe["step"]["forward_ms"] == pytest.approx(1.0 * samples, rel=0.02, abs=0.5)
        assert probe["step"]["backward_ms"] == pytest.approx(2.5 * samples, rel=0.02, abs=0.5)
        assert probe["device"] == "Simulated accelerator"


def test_how_the_device_ran(simulated, tmp_path):
    """Clocks, power and energy of the card that is trained on, the second of the machine, and a step without gaps."""
    (probe,) = measured(
        simulated,
        tmp_path,
        "--batch",
        "8",
        "--repeats",
        "1",
        "--seconds",
        "1s",
        work_us="1000,2500",
        nvml_mhz=1095,
        nvml_reasons=0x4,
        nvml_watts=250,
        copy_gb_per_s=1,
    )
    run = probe["run"]
    assert run["settled"]
    assert len(probe["warmup_ms"]) in range(10, 101, 5)
    assert (run["sm_mhz"], run["sm_mhz_before"], run["sm_mhz_max"], run["held_by"]) == (
        1095,
        1095,
        1410,
        ["its power limit"],
    )
    assert run["power_w"] == pytest.approx(250)
    assert run["energy_j"] == pytest.approx(250 * probe["median_ms"] / 1e3, rel=0.15)
    assert run["busy_share"] == pytest.approx(1, abs=0.03)
    assert run["launch_ms"] < 0.7 * probe["median_ms"]


def test_slow_first_steps_are_warm_up(simulated, tmp_path):
    """Seven of 68 ms before steps of 28: more than a window of the warm-up."""
    (probe,) = measured(
        simulated,
        tmp_path,
        "--batch",
        "8",
        "--repeats",
        "1",
        "--seconds",
        "1s",
        work_us="1000,2500",
        around=("SLOW_STEPS=7",),
    )
    warm, timed = probe["warmup_ms"], probe["step_times_ms"]
    assert min(warm[:7]) > 60
    assert max(timed) < 40
    assert len(warm) >= 15
    assert len(warm) + len(timed) == len(probe["losses"])
    assert (
        probe["run"]["busy_share"] is None
    )  # copies take no time here, so nothing can be queued behind them


def test_gaps_in_which_the_device_waits_for_the_host(simulated, tmp_path):
    (probe,) = measured(
        simulated,
        tmp_path,
        "--batch",
        "8",
        "--repeats",
        "1",
        kernel_us=5,
        launch_us=600,
        copy_gb_per_s=1,
    )
    assert probe["run"]["busy_share"] < 0.2
    # profiled steps are others than those of the median, and on a busy machine longer
    assert probe["run"]["launch_ms"] > 0.7 * probe["median_ms"]
    assert probe["run"]["power_w"] is None


def test_it_trains_as_the_cpu_does(simulated, tmp_path):
    (there,) = measured(simulated, tmp_path, "--batch", "8", "--repeats", "1")
    (here,) = measured(simulated, tmp_path, "--batch", "8", "--repeats", "1", "--device", "cpu")
    assert there["losses"][:20] == pytest.approx(here["losses"][:20], rel=1e-4)
    assert there["losses"][19] < there["losses"][0]


def test_accumulation_counts_every_micro_batch(simulated, tmp_path):
    (probe,) = measured(
        simulated,
        tmp_path,
        "--batch",
        "8",
        "--repeats",
        "1",
        "--accumulate",
        "3",
        work_us="500,1000",
    )
    assert probe["median_ms"] == pytest.approx(36, rel=0.03)
    assert probe["step"]["forward_ms"] == pytest.approx(12, rel=0.03, abs=0.5)


def test_launches_bound_a_step_of_small_kernels(simulated, tmp_path):
    quick, slow = (
        measured(simulated, tmp_path, "--batch", "8", "--repeats", "1", kernel_us=5, launch_us=us)[
            0
        ]["median_ms"]
        for us in (300, 2100)
    )
    # the same launches, each 1.8 ms longer, of which none is hidden behind kernels of 5 us
    launches = (slow - quick) / 1.8
    assert 15 < launches < 120
    assert slow == pytest.approx(2.1 * launches, rel=0.3)


def test_memory_is_the_allocators(simulated, tmp_path):
    probes = measured(simulated, tmp_path, "--batch", "8,24", "--repeats", "1", activation_mib=1)
    small, large = (1024 * probe["peak_memory_gib"] for probe in probes)
    assert large - small == pytest.approx(16, abs=0.5)
    assert 8 <= small < 10
    assert all(probe["reserved_memory_gib"] >= probe["peak_memory_gib"] for probe in probes)


def test_the_largest_batch_that_fits(simulated):
    run = simulated(
        "env",
        "ACTIVATION_MIB=8",
        "trainpace",
        "measure",
        "planted.py:task",
        "--device",
        "sim",
        "--batch",
        "1:16",
        "--until-oom",
        "--no-forecast",
        "--no-journal",
        "--json",
        "--seconds",
        "0ms",
        "--repeats",
        "1",
        memory_mib=60,
    )
    analysis = json.loads(run.stdout)["analysis"]
    assert max(point["batch"] for point in analysis["points"]) == 7
    assert {f["failure"] for f in analysis["failures"]} == {"out_of_memory"}
    assert min(f["batch"] for f in analysis["failures"]) == 8


def test_a_name_that_torch_does_not_know(simulated):
    run = simulated("trainpace", "measure", "planted.py:task", "--device", "simm", "--no-journal")
    assert run.returncode == 2
    assert "unknown device 'simm'" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("work", "arguments", "settings", "part"),
    [
        ("500,1000", ("item",), {}, "waiting for the device"),
        (
            "500,1000",
            (),
            {},
            "waiting for the device",
        ),  # a copy from pageable memory waits for the kernels before it
        ("0,0", (), {"copy_gb_per_s": 0.0001}, "copies to the device"),
        ("500,1000", ("pinned",), {}, None),  # the host waits for nothing until the end
    ],
)
def test_an_unchanged_script_is_watched(simulated, work, arguments, settings, part):
    plain = simulated("env", f"WORK_US={work}", "python", "train.py", *arguments, **settings)
    watched = simulated(
        "env",
        f"WORK_US={work}",
        "trainpace",
        "watch",
        "--output",
        "recording",
        "--",
        "python",
        "train.py",
        *arguments,
        **settings,
    )
    assert watched.returncode == 0, watched.stderr
    assert plain.stdout in watched.stdout  # the same loss to the last digit
    assert "the device works asynchronously" in watched.stdout
    largest = re.search(r"the largest part is ([^(]*)", watched.stdout)
    assert largest is not None
    if part is None:
        assert not re.search("waiting for the device|copies to the device", largest[1]), (
            watched.stdout
        )
    else:
        assert part in largest[1], watched.stdout


def test_a_ladder_is_climbed(simulated, tmp_path):
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
    # copies from pageable memory wait for the device, which then waits for the host
    assert len(steps_ms) == 2
    assert all(28 <= ms < 32 for ms in steps_ms), run.stdout


@pytest.mark.long  # the one with a broken driver, which any run tries, sees most of the same
def test_the_doctor_examines_it(simulated, tmp_path):
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
    assert status["memory"] == status["watch"] == status["clock"] == "ok"
    assert status["clocks"] == "note"  # during the known step
    assert run.returncode == int(not examination["well"])
    assert "held down by its power limit" in (tmp_path / "doctor.html").read_text()


def test_the_doctor_with_a_broken_driver_and_a_format_without_kernels(simulated):
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
    said = " ".join(run.stdout.split())
    assert (
        "The NVIDIA driver does not answer as it should: Driver/library version mismatch. See whether nvidia-smi works."
        in said
    )
    assert (
        "Products in bf16 do not work here: RuntimeError: SIM error: no kernel image is available"
        in said
    )
    assert "fp16" in said


def test_a_torch_that_does_not_start(simulated):
    run = simulated("trainpace", "doctor", library="/nowhere.so")
    assert run.returncode == 1, run.stderr
    assert "Failed" in run.stdout
    assert "Failed to load the backend extension: sim" in " ".join(run.stdout.split())
    assert "Traceback" not in run.stdout
