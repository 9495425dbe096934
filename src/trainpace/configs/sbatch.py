"""Slurm batch scripts: the #SBATCH options, and the command that starts the training. Source: sbatch's manual."""

import re
import shlex

from trainpace.configs.command import has_launcher, read_launch, split_words
from trainpace.configs.names import names
from trainpace.configs.reading import Reading
from trainpace.configs.settings import ConfigFile, SettingName
from trainpace.errors import TrainpaceError, UnreadableInput
from trainpace.units import parse_duration_s

SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task", "a": "array", "G": "gpus"}
_COUNTED = frozenset("nodes ntasks ntasks-per-node gpus-per-node gpus-per-task gpus gres time array".split())
_OTHERS = frozenset(names("slurm", "other_options"))
_SBATCH = re.compile(r"#SBATCH\s+(.*)")


def is_sbatch(text: str) -> bool:
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def read_sbatch(text: str, file: str) -> ConfigFile:
    """Settings of a batch script. The processes per node are torchrun's where it is used, else the tasks that srun starts."""
    reading = Reading(file, "Slurm batch script")
    options = _options(text, reading)
    reading.flag_unknown(options, _COUNTED | _OTHERS, "not an option of sbatch", "#SBATCH --")
    whole = {key: _whole(options.get(key), f"#SBATCH --{key}", reading) for key in ("nodes", "ntasks")}
    nodes, tasks = whole["nodes"], whole["ntasks"]
    per_node = _whole(options.get("ntasks-per-node"), "#SBATCH --ntasks-per-node", reading)
    gpus, gpus_key = _gpus_per_node(options, nodes, reading)
    if nodes:
        reading.put("nnodes", nodes, "#SBATCH --nodes")
    if gpus:
        reading.put("gpus_per_node", gpus, gpus_key)
    if nodes and tasks and per_node is None and tasks % nodes == 0:
        per_node = tasks // nodes
    body = _resolve(
        text,
        {
            "SLURM_NNODES": nodes,
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_NTASKS": tasks or (nodes and per_node and nodes * per_node),
            "SLURM_NPROCS": tasks or (nodes and per_node and nodes * per_node),
            "SLURM_NTASKS_PER_NODE": per_node if "ntasks-per-node" in options else None,
            "SLURM_TASKS_PER_NODE": per_node if nodes == 1 else None,
            "SLURM_GPUS_ON_NODE": gpus,
            "SLURM_GPUS_PER_NODE": gpus if "gpus-per-node" in options else None,
        },
    )
    launcher, line = _read_launcher(body, reading)
    if launcher:
        own = _srun_options(line, reading).keys() & {"ntasks", "ntasks-per-node"}
        if per_node and per_node > 1 and not own:
            text_ = f"{per_node} tasks a node would each start a launcher; 1 is usual"
            reading.warn("#SBATCH --ntasks-per-node", text_)
        has_nnodes = any(s.name == "nnodes" and s.key == "--nnodes" for s in reading.done().settings)
        nnodes_open = any(note.key == "--nnodes" for note in reading.done().notes)
        if nodes and nodes > 1 and launcher.startswith("torch") and not has_nnodes and not nnodes_open:
            text_ = f"{nodes}, and {launcher} has no --nnodes: it would start a separate training on each node"
            reading.warn("#SBATCH --nodes", text_)
    else:
        _read_srun(body, reading, per_node, tasks, "ntasks-per-node" in options)
    _read_limits(options, reading)
    return reading.done()


def _options(text: str, reading: Reading) -> dict[str, str]:
    options: dict[str, str] = {}
    in_commands = False
    for line in text.splitlines():
        match = _SBATCH.match(line)
        if match is None:
            in_commands = in_commands or bool(line.strip() and not line.lstrip().startswith("#"))
            continue
        written = match.group(1).strip()
        if in_commands:
            reading.warn("#SBATCH", f"{written[:60]!r} stands after the first command, so Slurm ignores it")
            continue
        try:
            words = shlex.split(written, comments=True)
        except ValueError:
            raise reading.fail("#SBATCH", written, "options with their quotes closed") from None
        if words[:1] in (["hetjob"], ["packjob"]):
            reading.warn("#SBATCH", "a heterogeneous job: only its first part is read")
            break
        for key, value in _pairs(words, reading):
            if options.get(key, value) != value and key in _COUNTED:
                raise reading.fail(f"#SBATCH --{key}", value, f"given once; it was {options[key]} before")
            options[key] = value
    return options


def _pairs(words: list[str], reading: Reading) -> list[tuple[str, str]]:
    """Options under their long names with their values: `-N2 --time 1:00 --exclusive` is nodes 2, time 1:00, exclusive ""."""
    pairs: list[tuple[str, str]] = []
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
        elif re.match(r"-[A-Za-z]", word):
            key, value = SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            has_value = value
        else:
            reading.warn("#SBATCH", f"{word[:60]!r} is not understood")
            continue
        if not has_value and i < len(words) and not words[i].startswith("-"):
            value = words[i]
            i += 1
        if len(key) > 1:
            pairs.append((key, value))
    return pairs


def _gpus_per_node(options: dict[str, str], nodes: int | None, reading: Reading) -> tuple[int | None, str]:
    for key in ("gpus-per-node", "gres"):
        key_ = f"#SBATCH --{key}"
        parts = re.sub(r"\([^)]*\)", "", options.get(key, "")).split(",")  # gpu:a100:4(S:0-1)
        if key == "gres":
            parts = [part.removeprefix("gres/") for part in parts if re.match(r"(gres/)?gpu(:|=|$)", part)]
            parts = [re.sub(r"^gpu[:=]?", "", part) for part in parts]
        if key in options and parts:
            return sum(_gpu_count(part, key_, reading) for part in parts) or None, key_
    total = _gpu_count(options["gpus"], "#SBATCH --gpus", reading) if "gpus" in options else None
    if total and nodes and total % nodes == 0:
        return total // nodes, "#SBATCH --gpus"
    if total:
        reading.note("#SBATCH --gpus", f"{total} over all nodes; how many a node is not stated")
    if "gpus-per-task" in options:
        reading.note("#SBATCH --gpus-per-task", f"{options['gpus-per-task']}: GPUs a node follow from the tasks")
    return None, ""


def _gpu_count(written: str, key: str, reading: Reading) -> int:
    """The number of GPUs in `a100:4` (a type and a number), `4`, or, in --gres, a type alone, which is one GPU."""
    number = written.rpartition(":")[2]
    if key == "#SBATCH --gres" and re.fullmatch(r"([A-Za-z][\w.-]*)?", number):
        return 1
    return _whole(number, key, reading, least=0) or 0


def _whole(value: str | None, key: str, reading: Reading, least: int = 1) -> int | None:
    if value is None:
        return None
    span = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", value)
    if span and span.group(1) != span.group(2):
        leaves_open: SettingName | None = "nnodes" if key.endswith("--nodes") else None
        reading.note(key, f"{value} is a range: the number is not known here", leaves_open=leaves_open)
        return None
    number = span.group(1) if span else value
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < least:
        raise reading.fail(key, value, f"a whole number from {least}")
    return int(number)


def _resolve(text: str, variables: dict[str, int | None]) -> str:
    """The script's commands, with Slurm's variables replaced where the script's own options give their values."""
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for name, value in variables.items():
        if value:
            body = re.sub(rf"\$\{{{name}\}}|\${name}\b", str(value), body)
    return body.replace("\\\n", " ")


def _read_launcher(body: str, reading: Reading) -> tuple[str | None, str]:
    """The first launcher in the script, and its line."""
    launchers: list[tuple[str, str]] = []
    for line in filter(has_launcher, body.splitlines()):
        try:
            launcher = read_launch(line, Reading(reading.file, "") if launchers else reading)
        except UnreadableInput as error:
            if "split into words" not in str(error) and not launchers:
                raise
            reading.warn("launch line", f"{line.strip()[:60]!r} is not understood")
        else:
            launchers += [(launcher, line)] if launcher else []
    if len(launchers) > 1:
        reading.warn("launch line", f"{len(launchers)} of them; only the first is read")
    return launchers[0] if launchers else (None, "")


def _read_srun(body: str, reading: Reading, per_node: int | None, tasks: int | None, written: bool) -> None:
    """Read bare `srun python ...`, which starts one process per task; srun's own options override the script's."""
    lines = [line for line in body.splitlines() if re.match(r"\s*(exec\s+)?srun(\s|$)", line)]
    if not lines:
        return
    line = next((line for line in lines if re.search(r"python|\.py\b|\.sh\b", line)), lines[-1])
    options = _srun_options(line, reading)
    own_per_node, own_tasks = options.get("ntasks-per-node"), options.get("ntasks")
    if own_per_node is not None:
        _put_task_count(reading, "nproc_per_node", own_per_node, "srun --ntasks-per-node")
    elif per_node and own_tasks is None:
        reading.put("nproc_per_node", per_node, "#SBATCH --ntasks-per-node" if written else "#SBATCH --ntasks")
    if own_tasks is not None:
        _put_task_count(reading, "world_size", own_tasks, "srun --ntasks")
    elif tasks and own_per_node is None:
        reading.put("world_size", tasks, "#SBATCH --ntasks")
    if options.get("nodes") is not None:
        _put_task_count(reading, "nnodes", options["nodes"], "srun --nodes")


def _put_task_count(reading: Reading, name: SettingName, value: str, key: str) -> None:
    if "$" in value:
        reading.note(key, f"{value} is known only when it runs", leaves_open=name)
    else:
        number = _whole(value, key, reading)
        if number:
            reading.put(name, number, key)


def _srun_options(line: str, reading: Reading) -> dict[str, str]:
    """The options between `srun` and the program."""
    try:
        words = split_words(line, reading.file)
    except UnreadableInput:
        reading.warn("srun", f"{line.strip()[:60]!r} is not understood")
        return {}
    if "srun" not in words:
        return {}
    own: list[str] = []
    for i, word in enumerate(words[words.index("srun") + 1 :], words.index("srun") + 1):
        after_option = bool(own) and re.fullmatch(r"--[a-z-]+|-[A-Za-z]", words[i - 1]) is not None
        if not word.startswith("-") and not (after_option and re.match(r"[0-9$]", word)):
            break
        own.append(word)
    return dict(_pairs(own, Reading("", "")))


def _read_limits(options: dict[str, str], reading: Reading) -> None:
    limit = options.get("time")
    if limit is not None:
        seconds = _time_limit_s(limit, reading)
        if seconds:
            reading.put("time_limit_s", seconds, "#SBATCH --time")
        else:
            reading.note("#SBATCH --time", f"{limit}: no limit")
    if "array" in options:
        reading.note("#SBATCH --array", f"{options['array']}: every member of the array trains on its own")


def _time_limit_s(value: str, reading: Reading) -> float:
    """Seconds of minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes[:seconds]; 0: no limit."""
    if value.casefold() in ("infinite", "unlimited"):
        return 0.0
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", value)
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
    if seconds >= 1e10:
        raise reading.fail("#SBATCH --time", value, "less than 300 years")
    return seconds
