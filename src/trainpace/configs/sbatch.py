"""Slurm batch scripts: the #SBATCH lines, and the launcher inside."""

from __future__ import annotations

import re

from trainpace.configs.command import read_launch
from trainpace.configs.settings import ConfigFile, Reading
from trainpace.errors import TrainpaceError
from trainpace.units import parse_duration_s

_SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task", "a": "array", "G": "gpus"}


def is_sbatch(text: str) -> bool:
    """It has an #SBATCH line."""
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def read_sbatch(text: str, file: str) -> ConfigFile:
    """Settings of a batch script. With torchrun inside, processes per node are torchrun's; with bare srun, the tasks."""
    reading = Reading(file, "Slurm batch script")
    options = _options(text, reading)
    nodes = _whole(options.get("nodes"), "#SBATCH --nodes", reading)
    tasks = _whole(options.get("ntasks"), "#SBATCH --ntasks", reading)
    tasks_per_node = _whole(options.get("ntasks-per-node"), "#SBATCH --ntasks-per-node", reading)
    gpus_per_node = _gpus(options, reading)
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for names, value in (
        (("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        (("SLURM_NTASKS", "SLURM_NPROCS"), tasks or (nodes and tasks_per_node and nodes * tasks_per_node)),
        (("SLURM_NTASKS_PER_NODE",), tasks_per_node),
        (("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), gpus_per_node),
    ):
        for name in names:
            if value:
                body = re.sub(rf"\$\{{{name}\}}|\${name}\b", str(value), body)
    if nodes:
        reading.put("nnodes", nodes, "#SBATCH --nodes")
    launched = _launcher(body, reading)
    if not launched and re.search(r"^\s*srun\b", body, re.MULTILINE):
        if tasks_per_node:
            reading.put("nproc_per_node", tasks_per_node, "#SBATCH --ntasks-per-node")
        if tasks:
            reading.put("world_size", tasks, "#SBATCH --ntasks")
    if launched and tasks_per_node and tasks_per_node > 1:
        reading.note(
            "#SBATCH --ntasks-per-node", f"{tasks_per_node} tasks would each start a launcher; 1 is usual", "warning"
        )
    if gpus_per_node:
        stated = [s for s in reading.done().settings if s.name == "nproc_per_node"]
        if stated and stated[-1].value != gpus_per_node:
            text_ = f"{gpus_per_node} GPUs a node are reserved and {stated[-1].value} processes a node are started"
            reading.note("#SBATCH --gpus-per-node", text_, "warning")
    limit = options.get("time")
    if limit is not None:
        reading.put("time_limit_s", _time_limit_s(limit, reading), "#SBATCH --time")
    if "array" in options:
        reading.note("#SBATCH --array", f"{options['array']}: every member of the array trains on its own")
    return reading.done()


def _options(text: str, reading: Reading) -> dict[str, str]:
    options: dict[str, str] = {}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        bare = line.split(" #")[0].strip()
        match = re.match(r"--([A-Za-z-]+)(?:[=\s]+(\S+))?$|-([A-Za-z])\s*=?\s*(\S+)$", bare)
        if not match:
            reading.note("#SBATCH", f"{bare[:60]!r} is not understood", "warning")
            continue
        key = match.group(1) or _SHORT.get(match.group(3), match.group(3))
        value = match.group(2) or match.group(4) or ""
        if key in options and options[key] != value and key != "gres":
            raise reading.fail(f"#SBATCH --{key}", value, f"given once; it was {options[key]} before")
        options[key] = value
    return options


def _gpus(options: dict[str, str], reading: Reading) -> int | None:
    for key in ("gpus-per-node", "gres"):
        value = options.get(key)
        if value is None or (key == "gres" and not value.startswith("gpu")):
            continue
        last = value.rpartition(":")[2]
        if key == "gres" and last == value:
            return 1
        return _whole(last, f"#SBATCH --{key}", reading)
    return None


def _whole(value: str | None, key: str, reading: Reading) -> int | None:
    if value is None:
        return None
    if re.fullmatch(r"\d+-\d+", value):
        low, _, high = value.partition("-")
        if low != high:
            reading.note(key, f"{value} is a range: the number is not known here")
            return None
        value = low
    if not re.fullmatch(r"\d{1,9}", value) or int(value) == 0:
        raise reading.fail(key, value, "a whole number from 1")
    return int(value)


def _time_limit_s(value: str, reading: Reading) -> float:
    """minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds] (sbatch's manual)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if not match:
        raise reading.fail("#SBATCH --time", value, "a time such as 24:00:00 or 2-12")
    days, first, second, third = match.groups()
    if days is not None:
        text = f"{days}d{first}h{second or 0}m{third or 0}s"
    elif third is not None:
        text = f"{first}h{second}m{third}s"
    else:
        text = f"{first}m{second or 0}s"
    try:
        seconds = parse_duration_s(text)
    except TrainpaceError:
        raise reading.fail("#SBATCH --time", value, "a time such as 24:00:00") from None
    if not 0 < seconds < 1e10:
        raise reading.fail("#SBATCH --time", value, "above 0")
    return seconds


def _launcher(body: str, reading: Reading) -> bool:
    joined = body.replace("\\\n", " ")
    for line in joined.splitlines():
        if re.search(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed)\b", line):
            try:
                if read_launch(line, reading) is not None:
                    return True
            except TrainpaceError as error:
                if "split into words" not in str(error):
                    raise
                reading.note("launch line", f"{line.strip()[:60]!r} is not understood", "warning")
    return False
