"""Reader and writer for launch commands and Slurm batch scripts.

The launchers are torchrun, python -m torch.distributed.run, accelerate launch, deepspeed, and plain
python, which starts one process.
Hugging Face flags of the script that they start are read too. The source for Slurm is the manual of
sbatch.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainpace.configs.accelerate import (
    MEETING,
    NO_DYNAMO,
    PRECISION,
    may_start_deepspeed,
    precision_word,
    read_dynamo,
)
from trainpace.configs.changes import OFFLOADS, SHARDING, WORLD, Draft
from trainpace.configs.huggingface import (
    DISTINCTIVE,
    KEYS,
    NAMES,
    put_training_arguments,
    write_arguments,
)
from trainpace.configs.settings import PYTHON, ConfigFile, Reading, SettingName, Value, names
from trainpace.configs.syntax import (
    ACCELERATE,
    DEEPSPEED,
    LARGEST_FILE_BYTES,
    TORCHRUN,
    Launch,
    Word,
    find_launch,
    find_python,
    is_open,
    launch_in,
    lines_of,
    resolved,
    with_flag,
    without,
    words_of,
)
from trainpace.core.errors import TrainpaceError, UnreadableInput

_SCRIPT_FLAGS = NAMES | DISTINCTIVE | KEYS.keys()
_WORDS: dict[SettingName, dict[str, Any]] = {
    "precision": PRECISION,
    "activation_checkpointing": {"true": True, "false": False},
}
"""Settings whose flags have words for values."""
_MEETS = ("rdzv-endpoint", "master-addr", "main-process-ip", "hostfile", "H", "config-file")
_MEETINGS = {
    "torchrun": "on several nodes, start torchrun on each of them with the same --rdzv-endpoint",
    "accelerate": MEETING,
    "deepspeed": "on several nodes, deepspeed needs a --hostfile",
}


def parse_command(command: str, file: str = "command") -> ConfigFile:
    """Read a launch command.

    Raises:
        UnreadableInput: If the text has no known launcher.
    """
    if len(command) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, so it is not a launch command.")
    launch = find_launch(command, file) or find_python(command)
    if launch is None:
        launchers = "python, torchrun, accelerate launch, deepspeed"
        text = f"{file}: {command[:60]!r} is not a known launch command."
        raise UnreadableInput(text, f"Known: {launchers}.")
    return read_launch(launch, Reading(file, "launch command")).done()


def read_launch(launch: Launch, reading: Reading) -> Reading:
    """Read the settings of a launch command and of its script's flags."""
    launcher, seen = launch.launcher, _flags_of(launch, reading)
    reading.over = "accelerate" if launcher is ACCELERATE else ""
    if launch.name == PYTHON:
        reading.put("nproc_per_node", 1, PYTHON)
    for name, value in seen.items():
        if name == "dynamo-backend":
            read_dynamo(reading, value, f"--{name}", bool(launch.flag("use-deepspeed")))
        elif name in launcher.reads:
            _read_flag(reading, launcher.reads[name], value, _key_of(name))
    if launcher.others is not None:
        known = launcher.reads.keys() | launcher.alone | launcher.others
        reading.warn_unknown(seen, known, "not a flag of this launcher", "--")
    for name in ("config-file", "deepspeed-config-file"):
        if file := seen.get(name):
            reading.name_file(f"--{name}", file)
    _read_script(launch, reading)
    _note_default_processes(launch, reading, seen.keys())
    return reading


def _flags_of(launch: Launch, reading: Reading) -> dict[str, str | None]:
    """Return the values of a launcher's flags. A flag without a value has None.

    Raises:
        UnreadableInput: If a value is missing, or a flag is given twice with different values.
    """
    values: dict[str, str | None] = {}
    for flag in launch.flags:
        name, value = flag.name, None if flag.value is None else flag.value.value
        if value is None and name not in launch.launcher.alone:
            raise UnreadableInput(f"{reading.file}: {flag.written} has no value.")
        if values.setdefault(name, value) != value:
            raise UnreadableInput(
                f"{reading.file}: {_key_of(name)} is given twice, as {values[name]} and {value}."
            )
    return values


def _key_of(name: str) -> str:
    return f"--{name}" if len(name) > 1 else f"-{name}"


def _note_default_processes(launch: Launch, reading: Reading, seen: Any) -> None:
    """Add a note on a launcher's default number of processes if no flag sets the number."""
    if launch.launcher is TORCHRUN and "nproc-per-node" not in seen:
        reading.note("--nproc-per-node", "missing; torchrun's default is 1 process per node")
    elif launch.launcher is ACCELERATE and "num-processes" not in seen:
        text = "missing; accelerate's configuration file states it, or every GPU is used"
        reading.note("--num_processes", text, leaves_open="world_size")
    elif launch.launcher is DEEPSPEED and not seen & (DEEPSPEED.reads.keys() - {"num-nodes"}):
        text = "missing; DeepSpeed uses every GPU"
        reading.note("--num_gpus", text, leaves_open="nproc_per_node")


def _read_flag(reading: Reading, name: SettingName, value: str | None, key: str) -> None:
    if value is None:  # Only --use-fsdp has no value.
        reading.put("sharding", "fsdp", key)
    elif why := _why_unknown(name, value):
        reading.note(key, f"{value}{why}", leaves_open=name)
    elif key in ("--include", "-i"):
        _read_include(reading, value, key)
    elif name in _WORDS:
        reading.read_word(name, value.casefold(), key, _WORDS[name])
    elif name in OFFLOADS:
        reading.read(name, value, key)
    elif number := re.fullmatch(r"([0-9]{1,15})(:\1)?", value):
        reading.read(name, int(number[1]), key)
    else:
        raise reading.fail(key, value, "a whole number")


def _why_unknown(name: SettingName, value: str) -> str:
    """Return why the value of a flag is unknown here, or ""."""
    if is_open(value):
        return " is known only at run time"
    if name == "nproc_per_node" and value in ("gpu", "cpu", "auto", "xpu"):
        return ": all devices of the machine, whose number is unknown here"
    low, _, high = value.partition(":")
    if name == "nnodes" and low.isdecimal() and high.isdecimal() and low != high:
        return f" is elastic, {low} to {high} nodes: the number is unknown here"
    return ""


def _read_include(reading: Reading, value: str, key: str) -> None:
    """Read the number of nodes and processes from DeepSpeed's `host:0,1,2@other:0,1,2`."""
    slots = [node.partition(":")[2] for node in value.split("@")]
    counts = {len(indices.split(",")) for indices in slots if indices}
    if "" not in slots and len(counts) == 1:
        reading.put("nproc_per_node", counts.pop(), key)
        reading.put("nnodes", len(slots), key)
    else:
        text = f"{value}: the nodes have different numbers of GPUs, or use all of theirs"
        reading.note(key, text, leaves_open="nproc_per_node")


def _read_script(launch: Launch, reading: Reading) -> None:
    """Read Hugging Face arguments among the script's flags.

    They override a file that `--config` names, as in TRL's scripts.
    """
    arguments: dict[str, Any] = {}
    reading.over = next((flag.text for flag in launch.script if flag.name == "config"), "")
    if reading.over.endswith((".yaml", ".yml")):
        reading.name_file("--config", reading.over)
    for flag in launch.script:
        name = flag.name.replace("-", "_")
        if name in ("deepspeed", "deepspeed_config"):
            if flag.text.endswith(".json"):
                reading.name_file(flag.written, flag.text)
        elif name in _SCRIPT_FLAGS and is_open(flag.text):
            reading.note_at_run_time(flag.written, flag.text)
        elif name in _SCRIPT_FLAGS:
            read = _scalar(flag.text)
            if arguments.setdefault(name, read) != read:
                text = f"{flag.written} is given twice, as {arguments[name]} and {read}."
                raise UnreadableInput(f"{reading.file}: {text}")
    if arguments.keys() & (DISTINCTIVE | {"max_steps"}):
        put_training_arguments(reading, arguments, "--")
    reading.over = ""


def _scalar(text: str) -> Any:
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_in_variables(draft: Draft) -> bool:
    """Return True if variables of the script contain the launcher or some of its flags.

    The launch command's settings are then not written, and a note asks the user to change them.
    """
    text = resolved(draft.text)
    launches = (find_launch(script, draft.file) for script in (draft.text, text))
    raw, whole = (found and [flag.written for flag in found.flags] for found in launches)
    if raw == whole:
        return False
    draft.leave_rest("variables of the script contain the launch command: change it by hand")
    return True


def write_command(draft: Draft) -> None:
    """Write the draft's settings into a launch command."""
    if _is_in_variables(draft):
        return
    in_accelerate = draft.launch.name == "accelerate"
    if in_accelerate and draft.names & {"nnodes", "nproc_per_node"}:
        draft.names |= {"world_size"}
    _write_world(draft)
    script = any(draft.get(name) is not None for name in (*DISTINCTIVE, "max_steps"))
    if script:
        write_arguments(draft)
    if in_accelerate:
        _write_accelerate(draft, script)
    note_meeting(draft)
    draft.leave_rest("the launch command has no flag for it")


def note_meeting(draft: Draft) -> None:
    """Add a note on what a launcher needs for several nodes if its command lacks it."""
    launch = draft.launch
    several = "nnodes" in draft.wrote & draft.names and draft.want["nnodes"] != 1
    if several and not launch.flag(*_MEETS):
        draft.note(_MEETINGS.get(launch.name, _MEETINGS["torchrun"]))


def _flag_of(draft: Draft, setting: str) -> str:
    """Return the launcher's flag for a setting: the flag in the command, or the usual one."""
    launch = draft.launch
    names = launch.names_of(setting)
    name = next((name for name in names if launch.flag(name)), names[0])
    return f"--{name if launch.launcher is TORCHRUN else name.replace('-', '_')}"


def _write_world(draft: Draft) -> None:
    launch = draft.launch
    names = [n for n in ("world_size", "nnodes", "nproc_per_node") if launch.names_of(n)]
    if include := launch.flag("include", "i"):
        draft.leave(f"{include.written} lists the GPUs: choose them by hand", *names)
        return
    for name in names:
        # By default, a launcher uses one node.
        draft.place(name, _flag_of(draft, name), adds=name != "nnodes" or draft.want["nnodes"] != 1)
        if name not in draft.left:
            draft.keep(name)


def _drop_multi_gpu(draft: Draft) -> None:
    if multi := draft.launch.flag("multi-gpu"):
        draft.text = without(draft.text, multi)


def _write_accelerate(draft: Draft, script: bool) -> None:
    if "world_size" in draft.wrote:
        draft.keep("nproc_per_node")
    if "world_size" in draft.names and draft.want["world_size"] == 1:
        _drop_multi_gpu(draft)
    for name in ("accumulation", "tp", "cp"):
        if name not in draft.wrote:
            draft.place(name, _flag_of(draft, name), adds=name == "accumulation")
    launch = draft.launch
    if (not script or launch.flag("mixed-precision")) and (word := precision_word(draft)):
        draft.place("precision", "--mixed_precision", word)
    _write_model(draft)
    if draft.names & set(SHARDING):
        _write_sharding(draft)


def _write_model(draft: Draft) -> None:
    """Write accelerate's flags for compilation and activation checkpointing."""
    if "compile" not in draft.wrote:
        if draft.launch.flag("use-deepspeed"):
            draft.leave(NO_DYNAMO, "compile")
        else:
            backend = "inductor" if draft.want["compile"] else "no"
            draft.place("compile", "--dynamo_backend", backend)
    name = "activation_checkpointing"
    wanted = draft.want[name]
    if draft.launch.flag("use-fsdp") and wanted != "selective":
        draft.place(name, "--fsdp_activation_checkpointing", wanted == "full")


def _write_sharding(draft: Draft) -> None:
    launch = draft.launch
    if launch.flag("use-fsdp"):
        if draft.want["zero_stage"] == 3:
            draft.keep("zero_stage")
        why = "FSDP shards here (--use_fsdp), in its own way"
        draft.leave(why, *(set(SHARDING) - draft.wrote))
        return
    if not launch.flag("use-deepspeed", "zero-stage"):
        if not may_start_deepspeed(draft, draft.get("--dynamo_backend")):
            return
        draft.text = with_flag(draft.text, launch.flags_end, launch.flags, "--use_deepspeed", None)
        _drop_multi_gpu(draft)  # accelerate accepts only one of them.
    draft.place_keys({name: _flag_of(draft, name) for name in SHARDING}, SHARDING)


_SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task", "a": "array", "G": "gpus"}
_COUNTED = frozenset(
    "nodes ntasks ntasks-per-node gpus-per-node gpus-per-task gpus gres time array".split()
)
_PROCESSES = _COUNTED - {"time", "array"}
_OTHERS = frozenset(names("slurm", "other_options"))
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+([^\r\n]*)", re.MULTILINE)
_GRES = r"^((?:gres/)?gpu(?:[:=][A-Za-z][\w.-]*)?)(?:[:=][0-9]+)?(?=\(|$)"
Options = dict[str, Word]
"""Options of sbatch or srun by their long names."""


def is_sbatch(text: str) -> bool:
    """Return True if the text is a Slurm batch script."""
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


class _Asked(NamedTuple):
    """Resources that a batch script requests. `per_node` and `tasks` count processes."""

    options: dict[str, str]
    nodes: int | None
    tasks: int | None
    per_node: int | None
    gpus: int | None

    def values(self) -> dict[str, int | None]:
        """Return Slurm's variables in the job, as far as the options determine them."""
        tasks = self.tasks or (self.nodes and self.per_node and self.nodes * self.per_node)
        given = self.options.keys()
        return {
            "SLURM_NNODES": self.nodes,
            "SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_NTASKS_PER_NODE": self.per_node if "ntasks-per-node" in given else None,
            "SLURM_TASKS_PER_NODE": self.per_node if self.nodes == 1 else None,
            "SLURM_GPUS_ON_NODE": self.gpus,
            "SLURM_GPUS_PER_NODE": self.gpus if "gpus-per-node" in given else None,
        }


def read_sbatch(text: str, file: str) -> ConfigFile:
    """Read a Slurm batch script.

    If the script uses torchrun, torchrun states the processes per node. Otherwise they are the
    tasks that srun starts.
    """
    reading = Reading(file, "Slurm batch script")
    asked = _read_options(text, reading)
    values = {name: str(value) for name, value in asked.values().items() if value}
    text = resolved(text, values)
    launch = _first_launch(text, reading)
    line = launch.line if launch else _srun_line(text)
    own = _srun_options(text, line, reading)
    if launch is not None:
        _check_launch(launch, asked, own, reading)
    elif line != (0, 0) and _starts_unknown(text[slice(*line)], own, asked):
        reading.note("srun", "starts an unknown number of processes", leaves_open="nproc_per_node")
    elif line != (0, 0):
        _read_srun(own, asked, reading)
    elif plain := find_python(text):
        _read_python(plain, asked, reading)
    limit = asked.options.get("time")
    if limit is not None:
        if seconds := _time_limit_s(limit, reading):
            reading.put("time_limit_s", seconds, "#SBATCH --time")
        else:
            reading.note("#SBATCH --time", f"{limit}: no limit")
    if "array" in asked.options:
        text = f"{asked.options['array']}: every job of the array is a training of its own"
        reading.note("#SBATCH --array", text)
    return reading.done()


def _read_options(text: str, reading: Reading) -> _Asked:
    options = {key: word.value for key, word in _options(text, reading).items()}
    reading.warn_unknown(options, _COUNTED | _OTHERS, "not an option of sbatch", "#SBATCH --")
    nodes, tasks, per_node = (
        _whole(options.get(key), f"#SBATCH --{key}", reading)
        for key in ("nodes", "ntasks", "ntasks-per-node")
    )
    gpus, gpus_key = _gpus_per_node(options, nodes, reading)
    if nodes:
        reading.put("nnodes", nodes, "#SBATCH --nodes")
    if gpus:
        reading.put("gpus_per_node", gpus, gpus_key)
    if nodes and tasks and per_node is None and tasks % nodes == 0:
        per_node = tasks // nodes
    return _Asked(options, nodes, tasks, per_node, gpus)


def _check_launch(launch: Launch, asked: _Asked, own: Options, reading: Reading) -> None:
    """Warn about launchers that would be started too often, or that would train separately."""
    nodes, per_node = asked.nodes or 1, asked.per_node or 1
    if per_node > 1 and not own.keys() & {"ntasks", "ntasks-per-node"}:
        text = f"each of {per_node} tasks per node would start a launcher; 1 is usual"
        reading.warn("#SBATCH --ntasks-per-node", text)
    keys = {s.key for s in reading.settings} | {note.key for note in reading.notes}
    if nodes > 1 and launch.name.startswith("torch") and "--nnodes" not in keys:
        text = f"{nodes}, but {launch.name} has no --nnodes: each node would train separately"
        reading.warn("#SBATCH --nodes", text)


def _read_python(launch: Launch, asked: _Asked, reading: Reading) -> None:
    """Read a script that starts python without srun: one process, whatever Slurm reserves."""
    reading.settings = [s for s in reading.settings if s.name != "nnodes"]
    read_launch(launch, reading)
    nodes = asked.nodes or 1
    wanted = asked.tasks or nodes * (asked.per_node or asked.gpus or 1)
    if wanted > 1:
        asks = ", ".join(
            f"--{key}={asked.options[key]}" for key in asked.options if key in _PROCESSES
        )
        text = f"started without srun or a launcher: one process starts, not {wanted} ({asks})"
        reading.warn(PYTHON, text)


def _directives(text: str) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
    """Return the #SBATCH lines before the first command, and the ignored #SBATCH lines after it."""
    first = next((start for start, end in lines_of(text) if text[start:end].strip()), len(text))
    matches = list(_DIRECTIVE.finditer(text))
    return [m for m in matches if m.start() < first], [m for m in matches if m.start() >= first]


def _options(text: str, reading: Reading) -> Options:
    options: Options = {}
    heeded, ignored = _directives(text)
    for match in heeded:
        try:
            words = words_of(text, *match.span(1))
        except ValueError:
            raise reading.fail("#SBATCH", match.group(1), "options with closed quotes") from None
        if words and words[0].value in ("hetjob", "packjob"):
            reading.warn("#SBATCH", "a heterogeneous job: only its first part is read")
            break
        for key, word in _pairs(words, reading):
            if key in options and options[key].value != word.value and key in _COUNTED:
                expected = f"given once; it was {options[key].value} before"
                raise reading.fail(f"#SBATCH --{key}", word.value, expected)
            options[key] = word
    for match in ignored:
        line = match.group(1).strip()[:60]
        reading.warn("#SBATCH", f"{line!r} comes after the first command, so Slurm ignores it")
    return options


def _pairs(words: list[Word], reading: Reading | None = None) -> Iterator[tuple[str, Word]]:
    """Yield options by their long names. `-N2 --exclusive` gives nodes "2" and exclusive "".

    With `reading`, they are options of sbatch, and every other word adds a warning. Without it,
    they are options of srun, which end at the program. Only numbers are then values without a "=".
    """
    words = words[::-1]
    while words:
        word = words.pop()
        if word.value.startswith("--"):
            key, has_value, value = word.value[2:].partition("=")
        elif re.match(r"-[A-Za-z]", word.value):
            key, value = _SHORT.get(word.value[1], word.value[1]), word.value[2:].removeprefix("=")
            has_value = value
        elif reading is None:
            return
        else:
            reading.warn("#SBATCH", f"{word.value[:60]!r} is not understood")
            continue
        stated = Word(word.end - len(value), word.end, value)
        if not has_value and words and re.match("[^-]" if reading else "[0-9$]", words[-1].value):
            stated = words.pop()
        if len(key) > 1:
            yield key, stated


def _gpus_per_node(
    options: dict[str, str], nodes: int | None, reading: Reading
) -> tuple[int | None, str]:
    """Return the number of GPUs per node, and the option that states it."""
    for key in ("gpus-per-node", "gres"):
        parts = _gpu_parts(options, key)
        if parts:
            written = f"#SBATCH --{key}"
            return sum(_gpu_count(part, written, reading) for part in parts) or None, written
    key = "#SBATCH --gpus"
    total = _gpu_count(options["gpus"], key, reading) if "gpus" in options else 0
    if total and nodes and total % nodes == 0:
        return total // nodes, key
    if total:
        reading.note(key, f"{total} over all nodes; the number per node is unknown")
    return None, ""


def _gpu_parts(options: dict[str, str], key: str) -> list[str]:
    """Return the GPU parts of an option such as gpu:a100:4(S:0-1), without "gpu"."""
    if key not in options:
        return []
    parts = re.sub(r"\([^)]*\)", "", options[key]).split(",")
    if key == "gres":
        gpus = (part.removeprefix("gres/") for part in parts)
        parts = [part[4:] for part in gpus if re.match(r"gpu([:=]|$)", part)]
    return parts


def _gpu_count(written: str, key: str, reading: Reading) -> int:
    """Return the number of GPUs in `a100:4` or `4`. In --gres, a type alone means one GPU."""
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
        text = f"{value} is a range: the number is unknown here"
        reading.note(key, text, leaves_open=leaves_open)
        return None
    number = span.group(1) if span else value
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < least:
        raise reading.fail(key, value, f"a whole number from {least}")
    return int(number)


def _first_launch(text: str, reading: Reading) -> Launch | None:
    """Return the first launch command in the script, and record its settings."""
    launches: list[Launch] = []
    for start, end in lines_of(text):
        try:
            launch = launch_in(text, start, end)
        except ValueError:
            reading.warn("launch line", f"{text[start:end].strip()[:60]!r} is not understood")
            continue
        if launch and not launches:
            read_launch(launch, reading)
        launches += [launch] if launch else []
    if len(launches) > 1:
        reading.warn("launch line", f"there are {len(launches)}; only the first is read")
    return launches[0] if launches else None


def _srun_line(text: str) -> tuple[int, int]:
    """Return the start and end of the line whose `srun` starts the training, or (0, 0)."""
    lines = [
        line for line in lines_of(text) if re.match(r"\s*(exec\s+)?srun(\s|$)", text[slice(*line)])
    ]
    starts = (line for line in lines if re.search(r"python|\.py\b|\.sh\b", text[slice(*line)]))
    return next(starts, lines[-1] if lines else (0, 0))


def _srun_options(text: str, line: tuple[int, int], reading: Reading) -> Options:
    """Return the options between `srun` and the program."""
    try:
        words = words_of(text, *line)
    except ValueError:
        reading.warn("srun", f"{text[slice(*line)].strip()[:60]!r} is not understood")
        return {}
    at = next((i for i, word in enumerate(words) if word.value == "srun"), len(words))
    return dict(_pairs(words[at + 1 :]))


def _starts_unknown(line: str, own: Options, asked: _Asked) -> bool:
    """Return True if srun starts one task per node, and its program is not python.

    Such a program is usually a script that starts one process per GPU.
    """
    counts = {key: word.value for key, word in own.items()}
    nodes = counts.get("nodes", str(asked.nodes or 1))
    per_node = counts.get("ntasks-per-node", str(asked.per_node or ""))
    one = counts["ntasks"] == nodes if "ntasks" in counts else per_node == "1"
    return one and not re.search(r"\bpython|\.py\b", line)


def _read_srun(own: Options, asked: _Asked, reading: Reading) -> None:
    """Read a plain `srun python ...` with one process per task.

    srun's own options override those of the script.
    """
    counts: dict[str, SettingName] = {
        "ntasks-per-node": "nproc_per_node",
        "ntasks": "world_size",
        "nodes": "nnodes",
    }
    for key, name in counts.items():
        value = own[key].value if key in own else None
        if value is not None and is_open(value):
            reading.note_at_run_time(f"srun --{key}", value, name)
        elif number := _whole(value, f"srun --{key}", reading):
            reading.put(name, number, f"srun --{key}")
    if not own.keys() & {"ntasks-per-node", "ntasks"}:
        written = "ntasks-per-node" if "ntasks-per-node" in asked.options else "ntasks"
        if asked.per_node:
            reading.put("nproc_per_node", asked.per_node, f"#SBATCH --{written}")
        if asked.tasks:
            reading.put("world_size", asked.tasks, "#SBATCH --ntasks")


def slurm_seconds(written: str) -> float | None:
    """Convert one of Slurm's times to seconds, or return None for other text.

    Slurm writes minutes, minutes:seconds, hours:minutes:seconds, days-hours and
    days-hours:minutes[:seconds].
    """
    number = "([0-9]{1,9})"
    match = re.fullmatch(f"(?:{number}-)?{number}(?::{number})?(?::{number})?", written)
    if not match:
        return None
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # The time has no hours.
        parts = [0, *parts[:2]]
    return 86400.0 * days + 3600 * parts[0] + 60 * parts[1] + parts[2]


def _time_limit_s(value: str, reading: Reading) -> float:
    """Return a time limit in seconds. 0 means no limit."""
    if value.casefold() in ("infinite", "unlimited"):
        return 0.0
    seconds = slurm_seconds(value)
    if seconds is None:
        raise reading.fail("#SBATCH --time", value, "a time such as 24:00:00 or 2-12")
    if seconds >= 1e10:
        raise reading.fail("#SBATCH --time", value, "less than 300 years")
    return seconds


def write_sbatch(draft: Draft) -> None:
    """Write the draft's settings into a Slurm batch script."""
    if "time_limit_s" in draft.names:
        _put(draft, "time", _clock(float(draft.want["time_limit_s"])))
        draft.keep("time_limit_s")
    if _is_in_variables(draft):
        return
    launched = find_launch(draft.text, draft.file) is not None
    if draft.names & WORLD:
        _write_job_size(draft, launched)
    if launched:
        _write_launch(draft)
    draft.leave_rest("a batch script does not state it; the training's own files do")


def _write_launch(draft: Draft) -> None:
    """Write the flags whose values Slurm's variables do not already give."""
    settings = read_sbatch(draft.text, draft.file).settings
    stated: dict[str, Value] = {
        s.name: s.value for s in reversed(settings) if s.key.startswith("--")
    }
    names = draft.names
    right = {name for name in names if stated.get(name) == draft.want[name]}
    draft.names = names - right
    write_command(draft)
    draft.names = names
    draft.keep(*right)
    note_meeting(draft)


def _write_job_size(draft: Draft, launched: bool) -> None:
    nodes, per_node = int(draft.want["nnodes"]), int(draft.want["nproc_per_node"])
    options = {key: word.value for key, word in _stated(draft).items()}
    old_nodes, tasks = (
        _whole(options.get(key), key, Reading(draft.file, "")) for key in ("nodes", "ntasks")
    )
    _write_nodes(draft, nodes, "nodes" in options)
    # Keep the number of launchers per node, which is usually one.
    starts = tasks // (old_nodes or 1) if launched and tasks else per_node
    if tasks is not None:
        _put(draft, "ntasks", str(starts * nodes))
    if not launched:
        may_add = tasks is None and "nproc_per_node" in draft.may_add
        if "ntasks-per-node" in options or may_add:
            _put(draft, "ntasks-per-node", str(per_node))
        draft.keep("nproc_per_node", "world_size")
    _write_srun(draft, {"nodes": nodes, "ntasks": starts * nodes, "ntasks-per-node": starts})
    _write_gpus(draft, nodes, per_node)


def _write_nodes(draft: Draft, nodes: int, stated: bool) -> None:
    may_add = nodes != 1 and "nnodes" in draft.may_add
    if "nnodes" in draft.names and (stated or may_add):
        _put(draft, "nodes", str(nodes))
        draft.keep("nnodes")
    elif nodes == 1:
        draft.keep("nnodes")


def _write_srun(draft: Draft, counts: dict[str, int]) -> None:
    """Correct the counts in srun's own options, if it has them."""
    for key, count in counts.items():
        launch = find_launch(draft.text, draft.file)
        line = launch.line if launch is not None else _srun_line(draft.text)
        stated = _srun_options(draft.text, line, Reading(draft.file, "")).get(key)
        if stated is not None and stated.value.isdigit():
            draft.text = stated.replaced(draft.text, str(count))


def _write_gpus(draft: Draft, nodes: int, per_node: int) -> None:
    """Reserve one GPU per process, if the script reserves GPUs."""
    for key, count in (("gpus-per-node", per_node), ("gres", per_node), ("gpus", nodes * per_node)):
        gpus = _stated(draft).get(key)
        if gpus is None or "," in gpus.value:
            continue
        old, new = (_GRES, rf"\g<1>:{count}") if key == "gres" else (r"[0-9]+$", str(count))
        _put(draft, key, re.sub(old, new, gpus.value))
    draft.keep("gpus_per_node")


def _stated(draft: Draft) -> Options:
    return _options(draft.text, Reading(draft.file, ""))


def _put(draft: Draft, key: str, value: str) -> None:
    """Set an #SBATCH option in place, or add a line after the last option."""
    text, option = draft.text, _stated(draft).get(key)
    if option is not None:
        draft.text = option.replaced(text, value)
        return
    heeded, _ = _directives(text)
    if not heeded:
        raise TrainpaceError(f"{draft.file} has no #SBATCH line before its first command.")
    at, newline = heeded[-1].end(), "\r\n" if "\r\n" in text else "\n"
    draft.text = f"{text[:at]}{newline}#SBATCH --{key}={value}{text[at:]}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"
