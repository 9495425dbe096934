"""Machine detection on faked /proc and /sys trees, faked psutil and NVML, and on this machine."""

import errno
import os
import platform
import socket
import sys
import types
from pathlib import Path

import cpuinfo
import msgspec
import psutil
import pytest

from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.core.host import filesystem_of
from trainpace.measure.detection import Machine, detect, detect_cpu, measure_storage, warnings_of
from trainpace.measure.gpus import Gpu, detect_gpus


def tree(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def processors(sockets, name="Intel(R) Xeon(R) Gold 6142 CPU @ 2.60GHz"):
    return "".join(
        f"processor\t: {i}\nmodel name\t: {name}\nphysical id\t: {i % sockets}\n\n"
        for i in range(2 * sockets)
    )


CACHE = "sys/devices/system/cpu/cpu0/cache"
FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"
SERVER = {
    "proc/cpuinfo": processors(2),
    "proc/self/cgroup": "0::/\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    f"{FREQUENCY}/scaling_governor": "performance\n",
    f"{CACHE}/index0/level": "1\n",
    f"{CACHE}/index0/type": "Data\n",
    f"{CACHE}/index0/size": "32K\n",
    f"{CACHE}/index1/level": "1\n",
    f"{CACHE}/index1/type": "Instruction\n",
    f"{CACHE}/index1/size": "64K\n",
    f"{CACHE}/index2/level": "2\n",
    f"{CACHE}/index2/type": "Unified\n",
    f"{CACHE}/index2/size": "1024K\n",
    f"{CACHE}/index3/level": "3\n",
    f"{CACHE}/index3/type": "Unified\n",
    f"{CACHE}/index3/size": "22M\n",
}


@pytest.fixture(autouse=True)
def server(monkeypatch, request):
    """Fake a server without GPUs. Return a function that changes its figures."""

    def change(cores=(64, 32), affinity=range(33), memory_gib=377.58, load=0.52, nvml=None):
        monkeypatch.setattr(
            psutil, "cpu_count", lambda logical=True: cores[0] if logical else cores[1]
        )
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity), raising=False)
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: types.SimpleNamespace(total=memory_gib * 2**30)
        )
        monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.58, 0.59))
        monkeypatch.setitem(sys.modules, "pynvml", nvml or fake_nvml(init="LibraryNotFound"))

    if request.function not in (
        test_detect_describes_this_machine_without_private_data,
        test_fake_nvml_has_only_functions_of_pynvml,
    ):
        change()
        monkeypatch.setattr(cpuinfo, "get_cpu_info", dict)
    return change


def test_server_is_detected_from_proc_and_sys(tmp_path):
    m = detect(tree(tmp_path, SERVER))
    assert m.cpu.name == "Intel(R) Xeon(R) Gold 6142 CPU @ 2.60GHz"
    assert (m.cpu.physical_cores, m.cpu.logical_cores, m.cpu.affinity_cores) == (32, 64, 33)
    assert (m.cpu.governor, m.cpu.l2_bytes, m.cpu.l3_bytes) == ("performance", 2**20, 22 * 2**20)
    assert m.memory_gib == 377.58
    assert (m.memory_limit_gib, m.cpu.quota_cores, m.container, m.on_battery) == (
        None,
        None,
        False,
        None,
    )
    assert (m.operating_system, m.kernel, m.load_average) == (
        "Ubuntu 24.04.1 LTS",
        platform.release(),
        0.52,
    )
    assert warnings_of(m) == ()


def test_cpu_name_falls_back_to_py_cpuinfo(tmp_path, monkeypatch):
    files = {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n\nHardware\t: board\n"}
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: {"brand_raw": "Neoverse-N1"})
    assert detect_cpu(tree(tmp_path / "a", files)).name == "Neoverse-N1"
    monkeypatch.setattr(
        cpuinfo,
        "get_cpu_info",
        lambda: (_ for _ in ()).throw(Exception("works only on X86 and ARM")),
    )
    assert detect_cpu(tree(tmp_path / "b", files)).name == platform.machine()


def test_detect_works_without_proc_and_sys(tmp_path, monkeypatch, server):
    server(cores=(None, None))
    monkeypatch.delattr(os, "sched_getaffinity")
    m = detect(tmp_path)
    assert (m.cpu.logical_cores, m.cpu.usable_cores, m.cpu.l2_bytes, m.container) == (None,) * 4
    assert m.gpus == ()
    assert m.python
    assert warnings_of(m) == ()


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/a/b/memory.max": "8589934592\n",
            "sys/fs/cgroup/a/memory.max": "17179869184\n",
        },
        # Container without a cgroup namespace: the path is the host's, the limits are at the root.
        {
            "proc/self/cgroup": "0::/kubepods/pod1/x\n",
            "sys/fs/cgroup/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/memory.max": "8589934592\n",
        },
        {
            "proc/self/cgroup": "4:memory:/slurm/job\n3:cpu,cpuacct:/slurm/job\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "8589934592\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ],
    ids=["v2", "v2 in a container", "v1"],
)
def test_cgroup_limits_cores_and_memory(tmp_path, files):
    m = detect(tree(tmp_path, {**SERVER, **files, "proc/1/cgroup": "0::/docker/123\n"}))
    assert m.cpu.quota_cores == 4
    assert m.cpu.usable_cores == 4
    assert m.memory_limit_gib == 8
    assert warnings_of(m) == (
        "this process can use 4 of 32 physical cores, because of a CPU quota.",
        "the container may use 8.0 GiB of the machine's 377.6 GiB.",
    )


def test_limit_above_memory_is_ignored(tmp_path):
    files = {**SERVER, "sys/fs/cgroup/memory.max": str(2**50)}
    assert detect(tree(tmp_path, files)).memory_limit_gib is None


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        (
            {
                "BAT0/type": "Battery",
                "BAT0/status": "Discharging",
                "AC/type": "Mains",
                "AC/online": "0",
            },
            True,
        ),
        (
            {
                "BAT0/type": "Battery",
                "BAT0/status": "Charging",
                "AC/type": "Mains",
                "AC/online": "1",
            },
            False,
        ),
        ({"BAT0/type": "Battery", "BAT0/status": "Discharging"}, True),
        ({"AC/type": "Mains", "AC/online": "1"}, False),
        ({"mouse/type": "Battery", "mouse/scope": "Device", "mouse/status": "Discharging"}, None),
    ],
)
def test_battery_power_gives_warning(tmp_path, supplies, expected):
    m = detect(tree(tmp_path, {f"sys/class/power_supply/{k}": v for k, v in supplies.items()}))
    assert m.on_battery is expected
    assert bool(warnings_of(m)) is (expected is True)


# ---- GPUs ----

H200 = Gpu(
    name="NVIDIA H200",
    driver="550.90.07",
    cuda="12.4",
    memory_gib=143771 / 1024,
    pcie_generation=5,
    pcie_generation_max=5,
    pcie_width=16,
    pcie_width_max=16,
    power_limit_w=700,
    power_limit_default_w=700,
    mig=False,
    performance_state=0,
    other_processes=0,
)


class FakeError(Exception):
    pass


class LibraryNotFound(FakeError):
    pass


class DriverNotLoaded(FakeError):
    pass


class NoPermission(FakeError):
    pass


ERRORS = {kind.__name__: kind for kind in (LibraryNotFound, DriverNotLoaded, NoPermission)}


def fake_nvml(absent=(), init=None, count=1, **changed):
    """Fake pynvml with H200 GPUs. The GPU does not support the queries in `absent`; `init` is the error of nvmlInit."""

    def begin():
        if init:
            raise ERRORS[init]("Insufficient Permissions")

    device = {
        "Name": "NVIDIA H200",
        "MemoryInfo": types.SimpleNamespace(total=143771 * 2**20),
        "CurrPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 5,
        "CurrPcieLinkWidth": 16,
        "MaxPcieLinkWidth": 16,
        "PowerManagementLimit": 700000,
        "PowerManagementDefaultLimit": 700000,
        "MigMode": [0, 0],
        "PerformanceState": 0,
        "CurrentClocksThrottleReasons": 1,
        "ComputeRunningProcesses": [types.SimpleNamespace(pid=os.getpid())],
        **changed,
    }

    def answer(name, value):
        def function(*_):
            if name in absent:
                raise FakeError("Not Supported")
            return value

        return function

    functions = {f"nvmlDeviceGet{name}": answer(name, value) for name, value in device.items()}
    return types.SimpleNamespace(
        NVMLError=FakeError,
        NVMLError_LibraryNotFound=LibraryNotFound,
        NVMLError_DriverNotLoaded=DriverNotLoaded,
        nvmlInit=begin,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "550.90.07",
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda i: "H200",
        **functions,
    )


def test_all_gpus_of_server_are_detected():
    assert detect_gpus(fake_nvml(count=2)) == ((H200, H200), None)


def test_unsupported_nvml_queries_give_none():
    absent = (
        "PowerManagementLimit",
        "PowerManagementDefaultLimit",
        "MigMode",
        "ComputeRunningProcesses",
        "MemoryInfo",
    )
    ((gpu,), _) = detect_gpus(fake_nvml(absent))
    assert gpu == msgspec.structs.replace(
        H200,
        power_limit_w=None,
        power_limit_default_w=None,
        mig=None,
        other_processes=None,
        memory_gib=None,
    )


def test_mig_and_other_gpu_processes_are_detected():
    nvml = fake_nvml(
        MigMode=[1, 1],
        ComputeRunningProcesses=[types.SimpleNamespace(pid=1), types.SimpleNamespace(pid=2)],
    )
    ((gpu,), _) = detect_gpus(nvml)
    assert gpu == msgspec.structs.replace(H200, mig=True, other_processes=2)


def test_slow_pcie_link_and_throttling_give_warnings(tmp_path, server):
    server(nvml=fake_nvml(CurrPcieLinkGeneration=3, CurrentClocksThrottleReasons=0x8))
    assert warnings_of(detect(tmp_path)) == (
        "GPU 0 (NVIDIA H200) runs at PCIe generation 3 of 5.",
        "the clocks of GPU 0 (NVIDIA H200) are held down by the hardware's slowdown.",
    )


def test_idle_laptop_gpu_has_no_pcie_generation_warning(tmp_path, server):
    absent = (
        "PowerManagementLimit",
        "PowerManagementDefaultLimit",
        "PowerManagementLimitConstraints",
        "MigMode",
    )
    server(
        nvml=fake_nvml(
            absent,
            Name="RTX 3090 Laptop",
            CurrPcieLinkGeneration=1,
            CurrPcieLinkWidth=8,
            PerformanceState=8,
        )
    )
    # An idle link drops to generation 1, which is normal. 8 of 16 lanes are not.
    assert warnings_of(detect(tmp_path)) == ("GPU 0 (RTX 3090 Laptop) has 8 of 16 PCIe lanes.",)


def test_every_gpu_disturbance_gives_a_warning(tmp_path, server):
    nvml = fake_nvml(
        Name="NVIDIA A100-SXM4-80GB",
        PowerManagementLimit=350000,
        PowerManagementDefaultLimit=400000,
        CurrentClocksThrottleReasons=0x24,
        MigMode=[1, 1],
        ComputeRunningProcesses=[types.SimpleNamespace(pid=1), types.SimpleNamespace(pid=2)],
    )
    server(nvml=nvml)
    who = "GPU 0 (NVIDIA A100-SXM4-80GB)"
    warnings = warnings_of(detect(tmp_path))
    facts = ("350 W", "temperature", "MIG instances", "2 other programs")
    assert all(who in warning for warning in warnings)
    assert [fact in warning for fact, warning in zip(facts, warnings, strict=True)] == [True] * 4


@pytest.mark.parametrize("missing", ["LibraryNotFound", "DriverNotLoaded"])
def test_missing_nvidia_driver_means_no_gpus(missing):
    assert detect_gpus(fake_nvml(init=missing)) == ((), None)


def test_unresponsive_driver_is_reported(tmp_path, server):
    server(nvml=fake_nvml(init="NoPermission"))
    m = detect(tmp_path)
    assert (m.gpus, m.gpu_problem) == ((), "Insufficient Permissions")
    assert warnings_of(m) == (
        "the NVIDIA driver does not show every GPU (Insufficient Permissions).",
    )


def test_inaccessible_gpu_does_not_hide_other_gpus():
    nvml = fake_nvml(count=3)
    nvml.nvmlDeviceGetHandleByIndex = lambda i: (
        "H200" if i != 1 else (_ for _ in ()).throw(NoPermission("Insufficient Permissions"))
    )
    assert detect_gpus(nvml) == ((H200, H200), "GPU 1: Insufficient Permissions")


def test_fake_nvml_has_only_functions_of_pynvml():
    import pynvml

    made = fake_nvml()
    assert [name for name in vars(made) if not hasattr(pynvml, name)] == []
    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)


# ---- warnings that need no GPU ----


@pytest.mark.parametrize(
    ("changed", "files", "word"),
    [
        ({"affinity": range(4)}, {}, "4 of 32 physical cores, because of its CPU affinity"),
        ({}, {f"{FREQUENCY}/scaling_governor": "powersave\n"}, 'governor is "powersave"'),
        ({"load": 6.7}, {}, "load average is 6.7 on 33"),
        (
            {},
            {"sys/fs/cgroup/memory.max": "8589934592\n"},
            "this process's control group may use 8.0 GiB",
        ),
    ],
)
def test_each_machine_problem_gives_one_warning(tmp_path, server, changed, files, word):
    server(**changed)
    (sentence,) = warnings_of(detect(tree(tmp_path, {**SERVER, **files})))
    assert word in sentence


# ---- storage ----


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/database", "ext4"), ("/data/x", "btrfs"), ("/data/my disk/x", "nfs4")],
)
def test_filesystem_of_folder_is_that_of_its_mount(monkeypatch, folder, kind):
    places = [("/", "ext4"), ("/data", "xfs"), ("/data/my disk", "nfs4"), ("/data", "btrfs")]
    mounted = [types.SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in places]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounted)
    assert filesystem_of(folder) == kind


def test_storage_measurement_leaves_no_files(tmp_path):
    s = measure_storage(tmp_path, 3 * 2**20 + 1)
    assert s.size_bytes == 3 * 2**20 + 1
    assert 0.001 < s.write_gb_per_s < 100
    assert 0.001 < s.read_gb_per_s < 100
    assert list(tmp_path.iterdir()) == []


def test_cached_reads_are_marked(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    s = measure_storage(tmp_path, 2**20)
    assert s.read_from_cache
    m = msgspec.structs.replace(detect(tmp_path), storage=s)
    assert "the storage's read speed is probably that of the page cache in memory." in warnings_of(
        m
    )


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory filesystem here")
def test_shm_reads_are_marked_as_cached():
    assert measure_storage("/dev/shm", 2**20).read_from_cache


@pytest.mark.parametrize(
    ("code", "word"), [(errno.ENOSPC, "1 MiB"), (errno.EIO, "input/output error")]
)
def test_failing_disk_is_an_error(tmp_path, monkeypatch, code, word):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(TrainpaceError, match=word):
        measure_storage(tmp_path, 2**20)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(TrainpaceError, match="no such file"):
        measure_storage(tmp_path / "none", 2**20)


# ---- this machine ----


def test_detect_describes_this_machine_without_private_data():
    m = detect()
    assert m.cpu.logical_cores is None or m.cpu.logical_cores >= 1
    if hasattr(os, "sched_getaffinity"):
        assert m.cpu.affinity_cores == len(os.sched_getaffinity(0))
    if hasattr(os, "sysconf"):
        assert m.memory_gib == pytest.approx(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, rel=0.01
        )
    text = records.to_json(m)
    assert records.from_json(text, Machine) == m
    assert isinstance(warnings_of(m), tuple)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
