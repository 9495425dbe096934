"""What on a machine will disturb or limit measurements, in plain sentences."""

from collections.abc import Iterator

from trainpace.machine.detection import Machine
from trainpace.machine.gpus import Gpu

LOAD_SHARE = 0.2
BUSY_STATE = 2
"""P0 to P2 run training; above, an idle GPU also lowers its PCIe generation, which says nothing."""


def warnings_of(machine: Machine) -> tuple[str, ...]:
    """One sentence for each thing that is known to disturb; an unknown field says nothing."""
    return (
        *_cpu(machine), *_memory(machine), *(s for i, gpu in enumerate(machine.gpus) for s in _gpu(i, gpu)),
        *([f"the NVIDIA driver does not show every GPU ({machine.gpu_problem})."] if machine.gpu_problem else []),
        *_storage(machine),
    )  # fmt: skip


def _cpu(machine: Machine) -> Iterator[str]:
    cpu = machine.cpu
    usable, physical = cpu.usable_cores, cpu.physical_cores
    if usable is not None and physical is not None and usable < physical:
        limit = "a CPU quota" if cpu.quota_cores == usable else "its CPU affinity"
        yield f"this process can use {usable:g} of {physical} physical cores, because of {limit}."
    if cpu.governor is not None and cpu.governor != "performance":
        yield f'the CPU frequency governor is "{cpu.governor}", not "performance", so that clocks follow the load.'
    if machine.on_battery:
        yield "the machine runs on battery, which lowers clocks and power limits."
    if machine.load_average is not None and usable and machine.load_average > LOAD_SHARE * usable:
        yield f"other work is running: the load average is {machine.load_average:.1f} on {usable:g} usable cores."


def _memory(machine: Machine) -> Iterator[str]:
    if machine.memory_limit_gib is not None:
        total = "" if machine.memory_gib is None else f" of the machine's {machine.memory_gib:.1f} GiB"
        where = "the container" if machine.container else "this process's control group"
        yield f"{where} may use {machine.memory_limit_gib:.1f} GiB{total}."


def _gpu(index: int, gpu: Gpu) -> Iterator[str]:
    who = f"GPU {index}" + (f" ({gpu.name})" if gpu.name else "")
    if _below(gpu.pcie_width, gpu.pcie_width_max):
        yield f"{who} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes."
    busy = gpu.performance_state is not None and gpu.performance_state <= BUSY_STATE
    if busy and _below(gpu.pcie_generation, gpu.pcie_generation_max):
        yield f"{who} runs at PCIe generation {gpu.pcie_generation} of {gpu.pcie_generation_max}."
    if _below(gpu.power_limit_w, gpu.power_limit_default_w):
        yield f"{who} is limited to {gpu.power_limit_w:.0f} W, below its default of {gpu.power_limit_default_w:.0f} W."
    if gpu.throttled_by:
        yield f"the clocks of {who} are held down by {' and '.join(gpu.throttled_by)}."
    if gpu.mig:
        named = f" ({', '.join(gpu.mig_instances)})" if gpu.mig_instances else ""
        yield f"{who} is divided into MIG instances{named}, so that a process gets a part of it."
    if gpu.other_processes:
        programs = "1 other program uses" if gpu.other_processes == 1 else f"{gpu.other_processes} other programs use"
        yield f"{programs} {who}."


def _storage(machine: Machine) -> Iterator[str]:
    if machine.storage is not None and machine.storage.read_from_cache:
        yield "the storage's read speed is probably that of the page cache in memory."


def _below(value: float | None, full: float | None) -> bool:
    return value is not None and full is not None and value < full
