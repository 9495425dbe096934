"""Slurm batch scripts: the #SBATCH options, and the command that starts the training. Source: sbatch's manual."""

import re
from collections.abc import Iterator

from trainpace.configs.changes import Draft
from trainpace.configs.command import note_meeting, read_launch, write_command
from trainpace.configs.launch import (
    Launch,
    Word,
    find_launch,
    is_open,
    launch_in,
    lines_of,
    words_of,
)
from trainpace.configs.settings import ConfigFile, Reading, SettingName, Value, names
from trainpace.core.errors import TrainpaceError

_SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task", "a": "array", "G": "gpus"}
_COUNTED = frozenset(
    "nodes ntasks ntasks-per-node gpus-per-node gpus-per-task gpus gres time array".split()
)
_OTHERS = frozenset(names("slurm", "other_options"))
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+([^\r\n]*)", re.MULTILINE)
Options = dict[str, Word]
"""Options under their long names."""


def is_sbatch(text: str) -> bool:
    return re.search(r"^#SBATCH\s", text, re.MULTILINE) is not None


def read_sbatch(text: str, file: str) -> ConfigFile:
    """Settings of a batch script. The processes per node are torchrun's where it is used, else the tasks that srun starts."""
    reading = Reading(file, "Slurm batch script")
    options = {key: word.value for key, word in _options(text, reading).items()}
    reading.flag_unknown(options, _COUNTED | _OTHERS, "not an option of sbatch", "#SBATCH --")
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
    all_tasks = tasks or (nodes and per_node and nodes * per_node)
    variables = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": all_tasks,
        "SLURM_NPROCS": all_tasks,
        "SLURM_NTASKS_PER_NODE": per_node if "ntasks-per-node" in options else None,
        "SLURM_TASKS_PER_NODE": per_node if nodes == 1 else None,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus if "gpus-per-node" in options else None,
    }
    for name, value in variables.items():
        if value:
            text = re.sub(rf"\$\{{{name}\}}|\${name}\b", str(value), text)
    launch = _first_launch(text, reading)
    line = launch.line if launch else _srun_line(text)
    own = _srun_options(text, line, reading)
    if launch is None:
        _read_srun(own, line, reading, per_node, tasks, "ntasks-per-node" in options)
    else:
        keys = {s.key for s in reading.done().settings} | {
            note.key for note in reading.done().notes
        }
        if per_node and per_node > 1 and not own.keys() & {"ntasks", "ntasks-per-node"}:
            why = f"{per_node} tasks a node would each start a launcher; 1 is usual"
            reading.warn("#SBATCH --ntasks-per-node", why)
        if nodes and nodes > 1 and launch.name.startswith("torch") and "--nnodes" not in keys:
            why = (
                f"{nodes}, and {launch.name} has no --nnodes: it would start a separate training on"
                " each node"
            )
            reading.warn("#SBATCH --nodes", why)
    if "time" in options:
        seconds = _time_limit_s(options["time"], reading)
        if seconds:
            reading.put("time_limit_s", seconds, "#SBATCH --time")
        else:
            reading.note("#SBATCH --time", f"{options['time']}: no limit")
    if "array" in options:
        reading.note(
            "#SBATCH --array", f"{options['array']}: every member of the array trains on its own"
        )
    return reading.done()


def _directives(text: str) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
    """The #SBATCH lines before the first command, and those after it, which Slurm ignores."""
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
            raise reading.fail(
                "#SBATCH", match.group(1), "options with their quotes closed"
            ) from None
        if words and words[0].value in ("hetjob", "packjob"):
            reading.warn("#SBATCH", "a heterogeneous job: only its first part is read")
            break
        for key, word in _pairs(words, reading):
            if key in options and options[key].value != word.value and key in _COUNTED:
                expected = f"given once; it was {options[key].value} before"
                raise reading.fail(f"#SBATCH --{key}", word.value, expected)
            options[key] = word
    for match in ignored:
        written = match.group(1).strip()
        reading.warn(
            "#SBATCH", f"{written[:60]!r} stands after the first command, so Slurm ignores it"
        )
    return options


def _pairs(words: list[Word], reading: Reading) -> Iterator[tuple[str, Word]]:
    """Options under their long names with their values: `-N2 --time 1:00 --exclusive` is nodes 2, time 1:00, exclusive ""."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.value.startswith("--"):
            key, has_value, value = word.value[2:].partition("=")
        elif re.match(r"-[A-Za-z]", word.value):
            key, value = _SHORT.get(word.value[1], word.value[1]), word.value[2:].removeprefix("=")
            has_value = value
        else:
            reading.warn("#SBATCH", f"{word.value[:60]!r} is not understood")
            continue
        stated = Word(word.end - len(value), word.end, value)
        if not has_value and i < len(words) and not words[i].value.startswith("-"):
            stated = words[i]
            i += 1
        if len(key) > 1:
            yield key, stated


def _gpus_per_node(
    options: dict[str, str], nodes: int | None, reading: Reading
) -> tuple[int | None, str]:
    for key in ("gpus-per-node", "gres"):
        written = f"#SBATCH --{key}"
        parts = re.sub(r"\([^)]*\)", "", options.get(key, "")).split(",")  # gpu:a100:4(S:0-1)
        if key == "gres":
            parts = [
                part.removeprefix("gres/")
                for part in parts
                if re.match(r"(gres/)?gpu(:|=|$)", part)
            ]
            parts = [re.sub(r"^gpu[:=]?", "", part) for part in parts]
        if key in options and parts:
            return sum(_gpu_count(part, written, reading) for part in parts) or None, written
    total = _gpu_count(options["gpus"], "#SBATCH --gpus", reading) if "gpus" in options else None
    if total and nodes and total % nodes == 0:
        return total // nodes, "#SBATCH --gpus"
    if total:
        reading.note("#SBATCH --gpus", f"{total} over all nodes; how many a node is not stated")
    if "gpus-per-task" in options:
        reading.note(
            "#SBATCH --gpus-per-task",
            f"{options['gpus-per-task']}: GPUs a node follow from the tasks",
        )
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
        reading.note(
            key, f"{value} is a range: the number is not known here", leaves_open=leaves_open
        )
        return None
    number = span.group(1) if span else value
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < least:
        raise reading.fail(key, value, f"a whole number from {least}")
    return int(number)


def _first_launch(text: str, reading: Reading) -> Launch | None:
    """The first launch command in the script, whose settings are recorded."""
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
        reading.warn("launch line", f"{len(launches)} of them; only the first is read")
    return launches[0] if launches else None


def _srun_line(text: str) -> tuple[int, int]:
    """Start and end of the line with the `srun` that starts the training; an empty span where there is none."""
    lines = [
        line for line in lines_of(text) if re.match(r"\s*(exec\s+)?srun(\s|$)", text[slice(*line)])
    ]
    starts = (line for line in lines if re.search(r"python|\.py\b|\.sh\b", text[slice(*line)]))
    return next(starts, lines[-1] if lines else (0, 0))


def _srun_options(text: str, line: tuple[int, int], reading: Reading) -> Options:
    """The options between `srun` and the program."""
    try:
        words = words_of(text, *line)
    except ValueError:
        reading.warn("srun", f"{text[slice(*line)].strip()[:60]!r} is not understood")
        return {}
    at = next((i for i, word in enumerate(words) if word.value == "srun"), len(words))
    own: list[Word] = []
    for before, word in zip(words[at:], words[at + 1 :], strict=False):
        after_option = bool(own) and re.fullmatch(r"--[a-z-]+|-[A-Za-z]", before.value) is not None
        if not word.value.startswith("-") and not (
            after_option and re.match(r"[0-9$]", word.value)
        ):
            break
        own.append(word)
    return dict(_pairs(own, Reading("", "")))


def _read_srun(
    own: Options,
    line: tuple[int, int],
    reading: Reading,
    per_node: int | None,
    tasks: int | None,
    written: bool,
) -> None:
    """Read bare `srun python ...`, which starts one process per task; srun's own options override the script's."""
    if line == (0, 0):
        return
    counts: dict[str, SettingName] = {
        "ntasks-per-node": "nproc_per_node",
        "ntasks": "world_size",
        "nodes": "nnodes",
    }
    for key, name in counts.items():
        if key in own and is_open(own[key].value):
            reading.note(
                f"srun --{key}", f"{own[key].value} is known only when it runs", leaves_open=name
            )
        elif key in own and (number := _whole(own[key].value, f"srun --{key}", reading)):
            reading.put(name, number, f"srun --{key}")
    if per_node and not own.keys() & {"ntasks-per-node", "ntasks"}:
        reading.put(
            "nproc_per_node",
            per_node,
            "#SBATCH --ntasks-per-node" if written else "#SBATCH --ntasks",
        )
    if tasks and not own.keys() & {"ntasks-per-node", "ntasks"}:
        reading.put("world_size", tasks, "#SBATCH --ntasks")


def _time_limit_s(value: str, reading: Reading) -> float:
    """Seconds of minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes[:seconds]; 0: no limit."""
    if value.casefold() in ("infinite", "unlimited"):
        return 0.0
    match = re.fullmatch(
        r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", value
    )
    if not match:
        raise reading.fail("#SBATCH --time", value, "a time such as 24:00:00 or 2-12")
    days, *parts = (int(part) if part else 0 for part in match.groups())
    if match[1] is None and match[4] is None:  # no hours
        parts = [0, *parts[:2]]
    seconds = 86400.0 * days + 3600 * parts[0] + 60 * parts[1] + parts[2]
    if seconds >= 1e10:
        raise reading.fail("#SBATCH --time", value, "less than 300 years")
    return seconds


def write_sbatch(draft: Draft) -> None:
    launched = find_launch(draft.text, draft.file) is not None
    if draft.names & {"nnodes", "nproc_per_node", "world_size", "gpus_per_node"}:
        _write_world(draft, launched)
    if "time_limit_s" in draft.names:
        _put(draft, "time", _clock(float(draft.want["time_limit_s"])))
        draft.keep("time_limit_s")
    if launched:
        _write_launch(draft)
    draft.leave_rest("the batch script does not say it; the training's own files do")


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


def _write_world(draft: Draft, launched: bool) -> None:
    nodes, per_node = int(draft.want["nnodes"]), int(draft.want["nproc_per_node"])
    options, quiet = _stated(draft), Reading(draft.file, "")
    old_nodes, tasks = (
        _whole(options[key].value if key in options else None, key, quiet)
        for key in ("nodes", "ntasks")
    )
    if "nnodes" in draft.names and (
        "nodes" in options or (nodes != 1 and "nnodes" in draft.may_add)
    ):
        _put(draft, "nodes", str(nodes))
        draft.keep("nnodes")
    elif nodes == 1:
        draft.keep("nnodes")
    starts = (
        tasks // (old_nodes or 1) if launched and tasks else per_node
    )  # a launcher is started once a node
    if tasks is not None:
        _put(draft, "ntasks", str(starts * nodes))
    if not launched:
        if "ntasks-per-node" in options or (tasks is None and "nproc_per_node" in draft.may_add):
            _put(draft, "ntasks-per-node", str(per_node))
        draft.keep("nproc_per_node", "world_size")
    counts = {"nodes": nodes, "ntasks": starts * nodes, "ntasks-per-node": starts}
    for key, count in counts.items():  # srun's own, where it states them
        line = draft.launch.line if launched else _srun_line(draft.text)
        stated = _srun_options(draft.text, line, quiet).get(key)
        if stated is not None and stated.value.isdigit():
            draft.text = stated.replaced(draft.text, str(count))
    for key, count in (("gpus-per-node", per_node), ("gres", per_node), ("gpus", nodes * per_node)):
        gpus = _stated(draft).get(key)  # one GPU per process, where GPUs are reserved
        if gpus is None or "," in gpus.value:
            continue
        if key == "gres":
            typed = r"^((?:gres/)?gpu(?:[:=][A-Za-z][\w.-]*)?)(?:[:=][0-9]+)?(?=\(|$)"
            _put(draft, key, re.sub(typed, rf"\g<1>:{count}", gpus.value))
        else:
            _put(draft, key, re.sub(r"[0-9]+$", str(count), gpus.value))
    draft.keep("gpus_per_node")


def _stated(draft: Draft) -> Options:
    return _options(draft.text, Reading(draft.file, ""))


def _put(draft: Draft, key: str, value: str) -> None:
    """Set an #SBATCH option in place, or on a new line after the last one."""
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
