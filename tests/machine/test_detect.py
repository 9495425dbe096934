"""Machines as the system tells of them: faked trees, a faked NVML, a faked nvidia-smi, and this machine."""

import errno
import os
import socket
import types
from pathlib import Path

import msgspec
import pytest

from trainpace import records
from trainpace.errors import TrainpaceError
from trainpace.machine import gpus
from trainpace.machine.detect import Machine, detect, detect_cpu
from trainpace.machine.disturbances import warnings_of
from trainpace.machine.gpus import Gpu, detect_gpus
from trainpace.machine.storage import filesystem_of, measure_storage


def tree(root, files):
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def cpuinfo(sockets, cores, threads, name="Intel(R) Xeon(R) Gold 6142 CPU @ 2.60GHz"):
    blocks = [(s, c) for _ in range(threads) for s in range(sockets) for c in range(cores)]
    return "".join(
        f"processor\t: {i}\nmodel name\t: {name}\nphysical id\t: {s}\ncore id\t\t: {c}\n\n"
        for i, (s, c) in enumerate(blocks)
    )


CACHE = "sys/devices/system/cpu/cpu0/cache"
FREQUENCY = "sys/devices/system/cpu/cpu0/cpufreq"
SERVER = {
    "proc/cpuinfo": cpuinfo(2, 16, 2),
    "proc/meminfo": "MemTotal:       395923448 kB\nMemFree: 1 kB\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-31,40\n",
    "proc/self/cgroup": "0::/\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/loadavg": "0.52 0.58 0.59 1/823 12345\n",
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n',
    f"{FREQUENCY}/base_frequency": "2600000\n", f"{FREQUENCY}/cpuinfo_max_freq": "3700000\n", f"{FREQUENCY}/scaling_governor": "performance\n",
    f"{CACHE}/index0/level": "1\n", f"{CACHE}/index0/type": "Data\n", f"{CACHE}/index0/size": "32K\n",
    f"{CACHE}/index1/level": "1\n", f"{CACHE}/index1/type": "Instruction\n", f"{CACHE}/index1/size": "64K\n",
    f"{CACHE}/index2/level": "2\n", f"{CACHE}/index2/type": "Unified\n", f"{CACHE}/index2/size": "1024K\n",
    f"{CACHE}/index3/level": "3\n", f"{CACHE}/index3/type": "Unified\n", f"{CACHE}/index3/size": "22M\n",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_driver(monkeypatch, request):
    if request.function is not test_this_machine:
        monkeypatch.setattr(gpus.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
        monkeypatch.setenv("PATH", "")


def test_a_server(tmp_path):
    m = detect(tree(tmp_path, SERVER))
    assert m.cpu.name == "Intel(R) Xeon(R) Gold 6142 CPU @ 2.60GHz"
    assert (m.cpu.sockets, m.cpu.physical_cores, m.cpu.logical_cores, m.cpu.affinity_cores) == (2, 32, 64, 33)
    assert (m.cpu.base_mhz, m.cpu.max_mhz, m.cpu.governor) == (2600, 3700, "performance")
    assert (m.cpu.l1d_bytes, m.cpu.l2_bytes, m.cpu.l3_bytes) == (32 * 2**10, 2**20, 22 * 2**20)
    assert m.memory_gib == pytest.approx(377.58, abs=0.01)
    assert (m.memory_limit_gib, m.cpu.quota_cores, m.container, m.on_battery) == (None, None, False, None)
    assert (m.operating_system, m.kernel, m.load_average) == ("Ubuntu 24.04.1 LTS", "6.8.0-45-generic", 0.52)
    assert warnings_of(m) == ()


def test_the_base_clock_may_be_in_the_name(tmp_path):
    files = {name: text for name, text in SERVER.items() if not name.endswith("base_frequency")}
    assert detect_cpu(tree(tmp_path, files)).base_mhz == 2600


def test_arm_tells_its_cores_in_sys_alone(tmp_path):
    blocks = "".join(f"processor\t: {i}\nCPU implementer\t: 0x41\n\n" for i in range(4)) + "Hardware\t: board\n"
    topology = {
        f"sys/devices/system/cpu/cpu{i}/topology/{n}": v
        for i in range(4)
        for n, v in (("core_id", f"{i}\n"), ("physical_package_id", "0\n"))
    }
    cpu = detect_cpu(tree(tmp_path, {"proc/cpuinfo": blocks, **topology}))
    assert (cpu.sockets, cpu.physical_cores, cpu.logical_cores) == (1, 4, 4)


def test_nothing_to_read(tmp_path):
    m = detect(tmp_path)
    assert (m.cpu.logical_cores, m.cpu.usable_cores, m.memory_gib, m.container, m.load_average) == (None,) * 5
    assert m.gpus == ()
    assert m.python
    assert warnings_of(m) == ()


@pytest.mark.parametrize(
    "files",
    [{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
      "sys/fs/cgroup/a/b/memory.max": "8589934592\n", "sys/fs/cgroup/a/memory.max": "17179869184\n"},
     # a container without a cgroup namespace: the path is the host's, the limits are at the top
     {"proc/self/cgroup": "0::/kubepods/pod1/x\n", "sys/fs/cgroup/cpu.max": "400000 100000\n", "sys/fs/cgroup/memory.max": "8589934592\n"},
     {"proc/self/cgroup": "4:memory:/slurm/job\n3:cpu,cpuacct:/slurm/job\n0::/\n", "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_quota_us": "400000\n",
      "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "8589934592\n",
      "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}],
    ids=["v2", "v2 in a container", "v1"],
)  # fmt: skip
def test_limits_of_the_control_group(tmp_path, files):
    m = detect(tree(tmp_path, {**SERVER, **files, "proc/1/cgroup": "0::/docker/123\n"}))
    assert m.cpu.quota_cores == 4
    assert m.cpu.usable_cores == 4
    assert m.memory_limit_gib == 8
    assert warnings_of(m) == (
        "this process can use 4 of 32 physical cores, because of a CPU quota.",
        "the container may use 8.0 GiB of the machine's 377.6 GiB.",
    )


def test_a_limit_above_the_memory_is_none(tmp_path):
    files = {**SERVER, "sys/fs/cgroup/memory.max": str(2**50)}
    assert detect(tree(tmp_path, files)).memory_limit_gib is None


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [({"BAT0/type": "Battery", "BAT0/status": "Discharging", "AC/type": "Mains", "AC/online": "0"}, True),
     ({"BAT0/type": "Battery", "BAT0/status": "Charging", "AC/type": "Mains", "AC/online": "1"}, False),
     ({"BAT0/type": "Battery", "BAT0/status": "Discharging"}, True), ({"AC/type": "Mains", "AC/online": "1"}, False),
     ({"mouse/type": "Battery", "mouse/scope": "Device", "mouse/status": "Discharging"}, None)],
)  # fmt: skip
def test_batteries(tmp_path, supplies, expected):
    m = detect(tree(tmp_path, {f"sys/class/power_supply/{k}": v for k, v in supplies.items()}))
    assert m.on_battery is expected
    assert bool(warnings_of(m)) is (expected is True)


# ---- GPUs ----

SMI_H200 = "00000000:0F:00.0, NVIDIA H200, 550.90.07, 143771, 5, 5, 16, 16, 1980, 1980, 3201, 3201, 700.00, 700.00, 700.00, 9.0, Disabled, Enabled, Enabled, 34, P0, 0x0000000000000001"
SMI_LAPTOP = "00000000:01:00.0, NVIDIA GeForce RTX 3090 Laptop GPU, 535.183.01, 16384, 1, 4, 8, 16, 210, 2100, 405, 7001, [N/A], [N/A], [N/A], 8.6, [N/A], [N/A], Disabled, 43, P8, 0x0000000000000001"
SMI_MIG = "00000000:0F:00.0, NVIDIA A100-SXM4-80GB, 535.183.01, 81920, 4, 4, 16, 16, 1275, 1410, 1593, 1593, 350.00, 400.00, 400.00, 8.0, Enabled, Enabled, Enabled, 33, P0, 0x0000000000000024"
LIST_MIG = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-0000)
  MIG 3g.40gb     Device  0: (UUID: MIG-5ff3b4a2)
  MIG 1g.10gb     Device  1: (UUID: MIG-6aa3b4a2)
"""
BANNER = "| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.4     |\n"


def fake_smi(folder, monkeypatch, rows, users="", listing="", refuses="clocks_event_reasons"):
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'*{refuses}*) echo "Field \\"x\\" is not a valid field to query."; exit 2;;\n'
        f"--query-gpu*) cat <<'E'\n{rows}\nE\n;;\n--query-compute-apps*) cat <<'E'\n{users}\nE\n;;\n"
        f"-L) cat <<'E'\n{listing}\nE\n;;\n*) cat <<'E'\n{BANNER}\nE\n;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


H200 = Gpu(
    name="NVIDIA H200", driver="550.90.07", cuda="12.4", memory_gib=143771 / 1024, pcie_generation=5, pcie_generation_max=5,
    pcie_width=16, pcie_width_max=16, sm_mhz=1980, sm_mhz_max=1980, memory_mhz=3201, memory_mhz_max=3201, power_limit_w=700,
    power_limit_default_w=700, power_limit_max_w=700, compute_capability="9.0", mig=False, ecc=True, persistence=True,
    temperature_c=34, performance_state=0, other_processes=0,
)  # fmt: skip


@pytest.mark.parametrize("refuses", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_smi_on_a_server(tmp_path, monkeypatch, refuses):
    fake_smi(
        tmp_path,
        monkeypatch,
        f"{SMI_H200}\n{SMI_H200.replace('0F:', '1F:')}",
        "00000000:1F:00.0, 4242",
        refuses=refuses,
    )
    assert detect_gpus() == (H200, msgspec.structs.replace(H200, other_processes=1))


def test_smi_of_an_old_release(tmp_path, monkeypatch):
    fields = SMI_H200.split(", ")
    fake_smi(tmp_path, monkeypatch, ", ".join([*fields[:15], *fields[16:21]]), refuses="_reasons")
    assert detect_gpus() == (msgspec.structs.replace(H200, compute_capability=None),)


def test_smi_on_a_laptop(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, SMI_LAPTOP)
    (gpu,) = detect_gpus()
    assert (gpu.name, gpu.memory_gib, gpu.sm_mhz, gpu.sm_mhz_max) == (
        "NVIDIA GeForce RTX 3090 Laptop GPU",
        16,
        210,
        2100,
    )
    assert (gpu.power_limit_w, gpu.power_limit_default_w, gpu.mig, gpu.ecc, gpu.persistence) == (
        None,
        None,
        None,
        None,
        False,
    )
    # an idle link of generation 1 says nothing, 8 of 16 lanes do
    assert warnings_of(detect(tmp_path)) == ("GPU 0 (NVIDIA GeForce RTX 3090 Laptop GPU) has 8 of 16 PCIe lanes.",)


def test_smi_with_mig(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, SMI_MIG, "00000000:0F:00.0, 4242\n00000000:0F:00.0, 4243", LIST_MIG)
    (gpu,) = detect_gpus()
    assert gpu.mig_instances == ("3g.40gb", "1g.10gb")
    who = "GPU 0 (NVIDIA A100-SXM4-80GB)"
    assert warnings_of(detect(tmp_path)) == (
        f"{who} is limited to 350 W, below its default of 400 W.",
        f"the clocks of {who} are held down by its power limit and its temperature.",
        f"{who} is divided into MIG instances (3g.40gb, 1g.10gb), so that a process gets a part of it.",
        f"2 other programs use {who}.",
    )


@pytest.mark.parametrize(
    "rows",
    ["", "No devices were found", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"],
)
def test_smi_without_gpus(tmp_path, monkeypatch, rows):
    fake_smi(tmp_path, monkeypatch, rows)
    assert detect_gpus() == ()


class FakeError(Exception):
    pass


def fake_nvml(absent=(), **changed):
    """An H200, as pynvml tells of it. `absent` are not supported by the GPU."""
    device = {
        "Name": b"NVIDIA H200", "MemoryInfo": types.SimpleNamespace(total=143771 * 2**20), "CurrPcieLinkGeneration": 5,
        "MaxPcieLinkGeneration": 5, "CurrPcieLinkWidth": 16, "MaxPcieLinkWidth": 16, "PowerManagementLimit": 700000,
        "PowerManagementDefaultLimit": 700000, "PowerManagementLimitConstraints": [200000, 700000], "CudaComputeCapability": (9, 0),
        "MigMode": [0, 0], "EccMode": [1, 1], "PersistenceMode": 1, "PerformanceState": 0, "CurrentClocksThrottleReasons": 1,
        "ComputeRunningProcesses": [types.SimpleNamespace(pid=os.getpid())], "MaxMigDeviceCount": 7, **changed,
    }  # fmt: skip
    clocks = {"SM": (1980, 1980), "MEM": (3201, 3201)}

    def answer(name, value):
        def function(*_):
            if name in absent:
                raise FakeError("Not Supported")
            return value

        return function

    functions = {f"nvmlDeviceGet{name}": answer(name, value) for name, value in device.items()}
    return types.SimpleNamespace(
        NVMLError=FakeError, NVML_CLOCK_SM="SM", NVML_CLOCK_MEM="MEM", NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlSystemGetDriverVersion=lambda: b"550.90.07",
        nvmlSystemGetCudaDriverVersion=lambda: 12040, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda i: "H200",
        nvmlDeviceGetClockInfo=lambda _, kind: clocks[kind][0], nvmlDeviceGetMaxClockInfo=lambda _, kind: clocks[kind][1],
        nvmlDeviceGetTemperature=lambda _, kind: 34, **functions,
    )  # fmt: skip


def test_nvml_tells_what_smi_tells():
    assert detect_gpus(fake_nvml()) == (H200,)


def test_nvml_with_figures_that_are_not_supported():
    absent = (
        "PowerManagementLimit",
        "PowerManagementDefaultLimit",
        "EccMode",
        "MigMode",
        "ComputeRunningProcesses",
        "MemoryInfo",
    )
    (gpu,) = detect_gpus(fake_nvml(absent))
    assert gpu == msgspec.structs.replace(
        H200, power_limit_w=None, power_limit_default_w=None, ecc=None, mig=None, other_processes=None, memory_gib=None
    )


def test_nvml_with_mig_and_company():
    nvml = fake_nvml(
        MigMode=[1, 1], ComputeRunningProcesses=[types.SimpleNamespace(pid=1), types.SimpleNamespace(pid=2)]
    )
    nvml.nvmlDeviceGetMigDeviceHandleByIndex = lambda _, i: "slice" if i < 2 else (_ for _ in ()).throw(FakeError())
    nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H200 MIG 1g.18gb" if handle == "slice" else "NVIDIA H200"
    (gpu,) = detect_gpus(nvml)
    assert gpu == msgspec.structs.replace(H200, mig=True, mig_instances=("1g.18gb", "1g.18gb"), other_processes=2)


def test_nvml_with_a_slow_link(tmp_path, monkeypatch):
    nvml = fake_nvml(CurrPcieLinkGeneration=3, CurrentClocksThrottleReasons=0x8)
    monkeypatch.setattr(gpus.importlib, "import_module", lambda _: nvml)
    assert warnings_of(detect(tmp_path)) == (
        "GPU 0 (NVIDIA H200) runs at PCIe generation 3 of 5.",
        "the clocks of GPU 0 (NVIDIA H200) are held down by the hardware's slowdown.",
    )


def test_nvml_without_a_driver_gives_way_to_smi(tmp_path, monkeypatch):
    nvml = fake_nvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(FakeError("Driver Not Loaded"))
    assert detect_gpus(nvml) == ()
    fake_smi(tmp_path, monkeypatch, SMI_H200)
    assert detect_gpus(nvml) == (H200,)


# ---- warnings that need no GPU ----


@pytest.mark.parametrize(
    ("files", "word"),
    [({"proc/self/status": "Cpus_allowed_list:\t0-3\n"}, "4 of 32 physical cores, because of its CPU affinity"),
     ({f"{FREQUENCY}/scaling_governor": "powersave\n"}, 'governor is "powersave"'), ({"proc/loadavg": "6.70 1 1 1/1 1\n"}, "load average is 6.7 on 33"),
     ({"sys/fs/cgroup/memory.max": "8589934592\n"}, "this process's control group may use 8.0 GiB")],
)  # fmt: skip
def test_one_thing_is_one_sentence(tmp_path, files, word):
    (sentence,) = warnings_of(detect(tree(tmp_path, {**SERVER, **files})))
    assert word in sentence


# ---- storage ----

MOUNTS = """22 1 0:21 / / rw - ext4 /dev/sda1 rw
23 22 0:22 / /data rw shared:1 - xfs /dev/sdb rw
24 23 0:23 / /data/my\\040disk rw - nfs4 server:/x rw
25 22 0:24 / /data rw - btrfs /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"), [("/", "ext4"), ("/database", "ext4"), ("/data/x", "btrfs"), ("/data/my disk/x", "nfs4")]
)
def test_the_filesystem_of_a_folder(tmp_path, folder, kind):
    assert filesystem_of(folder, tree(tmp_path, {"proc/self/mountinfo": MOUNTS})) == kind


def test_storage_is_measured_and_leaves_nothing(tmp_path):
    s = measure_storage(tmp_path, 3 * 2**20 + 1)
    assert s.size_bytes == 3 * 2**20 + 1
    assert 0.001 < s.write_gb_per_s < 100
    assert 0.001 < s.read_gb_per_s < 100
    assert list(tmp_path.iterdir()) == []


def test_reads_from_memory_are_said(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    s = measure_storage(
        tmp_path, 2**20, tree(tmp_path / "root", {"proc/self/mountinfo": "1 1 0:1 / / rw - ext4 x rw\n"})
    )
    assert s.read_from_cache
    m = detect(tmp_path / "root", storage=s)
    assert "the storage's read speed is probably that of the page cache in memory." in warnings_of(m)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory filesystem here")
def test_a_memory_filesystem_is_memory():
    assert measure_storage("/dev/shm", 2**20).read_from_cache


@pytest.mark.parametrize(("code", "word"), [(errno.ENOSPC, "no room for the 1 MiB"), (errno.EIO, "input/output error")])
def test_a_disk_that_fails_is_one_sentence(tmp_path, monkeypatch, code, word):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(TrainpaceError, match=word):
        measure_storage(tmp_path, 2**20)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(TrainpaceError, match="no such file"):
        measure_storage(tmp_path / "none", 2**20)
    with pytest.raises(TrainpaceError, match="too small"):
        measure_storage(tmp_path, 0)


# ---- this machine ----


def test_this_machine():
    m = detect()
    assert m.cpu.logical_cores is None or m.cpu.logical_cores >= 1
    if hasattr(os, "sched_getaffinity"):
        assert m.cpu.affinity_cores == len(os.sched_getaffinity(0))
    if Path("/proc/meminfo").exists():
        assert m.memory_gib == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, rel=0.01)
    text = records.to_json(m)
    assert records.from_json(text, Machine) == m
    assert isinstance(warnings_of(m), tuple)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text
