"""sbatch scripts: the #SBATCH lines, srun's own options, and the launch command inside."""

import re
from collections.abc import Mapping

from trainpace.configs.draft import Draft
from trainpace.configs.launch_words import Word, find_launch, lines_of, words_of
from trainpace.configs.sbatch import SHORT, read_sbatch
from trainpace.configs.settings import Value
from trainpace.configs.writers.command import note_meeting, write_command

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)


def write_sbatch(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    launched = find_launch(draft.text) is not None
    if names & {"nnodes", "nproc_per_node", "world_size", "gpus_per_node"}:
        _write_world(draft, names, want, launched)
    if "time_limit_s" in names:
        _put(draft, "time", _clock(float(want["time_limit_s"])))
        draft.wrote.add("time_limit_s")
    if launched:
        _write_launch(draft, names, want)
    for name in sorted(names - draft.wrote - draft.left.keys() - {"world_size", "gpus_per_node", "global_batch"}):
        draft.leave(name, "the batch script does not say it; the training's own files do")


def _write_launch(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    """Write the flags whose values Slurm's variables do not already give."""
    stated: dict[str, Value] = {
        s.name: s.value for s in reversed(read_sbatch(draft.text, draft.file).settings) if s.key.startswith("--")
    }
    right = {name for name in names if stated.get(name) == want[name]}
    write_command(draft, names - right, want)
    for name in right | draft.wrote:
        draft.wrote.add(name)
        draft.left.pop(name, None)
    note_meeting(draft, names, want)


def _write_world(draft: Draft, names: frozenset[str], want: Mapping[str, Value], launched: bool) -> None:
    nodes, per_node = int(want["nnodes"]), int(want["nproc_per_node"])
    old_nodes = _number(draft, "nodes") or 1
    tasks = _number(draft, "ntasks")
    if "nnodes" in names and (_option(draft.text, "nodes") is not None or (nodes != 1 and "nnodes" in draft.may_add)):
        _put(draft, "nodes", str(nodes))
    if "nnodes" in names and (_option(draft.text, "nodes") is not None or nodes == 1):
        draft.wrote.add("nnodes")
    starts = tasks // old_nodes if launched and tasks else per_node  # a launcher is started once a node
    if tasks is not None:
        _put(draft, "ntasks", str(starts * nodes))
    if not launched:
        stated = _option(draft.text, "ntasks-per-node") is not None
        if stated or (tasks is None and "nproc_per_node" in draft.may_add):
            _put(draft, "ntasks-per-node", str(per_node))
        draft.wrote |= names & {"nproc_per_node", "world_size"}
    _write_srun(draft, nodes, per_node, starts)
    _write_gpus(draft, nodes, per_node)
    draft.wrote |= names & {"gpus_per_node"}


def _write_gpus(draft: Draft, nodes: int, per_node: int) -> None:
    """Reserve one GPU per process, where GPUs are reserved."""
    for key, count in (("gpus-per-node", per_node), ("gres", per_node), ("gpus", nodes * per_node)):
        option = _option(draft.text, key)
        if option is None or "," in option.value:
            continue
        if key == "gres":
            new = re.sub(
                r"^((?:gres/)?gpu(?:[:=][A-Za-z][\w.-]*)?)(?:[:=][0-9]+)?(?=\(|$)", rf"\g<1>:{count}", option.value
            )
        else:
            new = re.sub(r"[0-9]+$", str(count), option.value)
        _put(draft, key, new)


def _write_srun(draft: Draft, nodes: int, per_node: int, starts: int) -> None:
    """Correct srun's own counts, where it states them."""
    wanted = {"nodes": nodes, "ntasks": starts * nodes, "ntasks-per-node": per_node if starts == per_node else starts}
    for key, count in wanted.items():
        for start, end in lines_of(draft.text):
            words = words_of(draft.text, start, end)
            at = next((i for i, word in enumerate(words) if word.value == "srun"), None)
            own = [] if at is None else words[at + 1 :]
            stop = next(
                (i for i, w in enumerate(own) if re.search(r"python|torchrun|\.py$|\.sh$|^bash$", w.value)), len(own)
            )
            count_word = _value_among(own[:stop], key)
            if count_word is not None and count_word.value.isdigit():
                draft.text = draft.text[: count_word.start] + str(count) + draft.text[count_word.end :]
                break


def _option(text: str, key: str) -> Word | None:
    """The value of an #SBATCH option, and where it stands."""
    value = None
    for match in _directives(text):
        value = _value_among(words_of(text, match.start(1), match.end(1)), key) or value
    return value


def _directives(text: str) -> list[re.Match[str]]:
    """The #SBATCH lines before the first command; Slurm ignores the others."""
    first = next((start for start, end in lines_of(text) if text[start:end].strip()), len(text))
    return [match for match in _DIRECTIVE.finditer(text) if match.start() < first]


def _value_among(words: list[Word], key: str) -> Word | None:
    short = next((letter for letter, name in SHORT.items() if name == key), "")
    for i, word in enumerate(words):
        if word.value.startswith(f"--{key}="):
            value = word.value.partition("=")[2]
            return Word(word.end - len(value), word.end, value)
        if word.value in (f"--{key}", f"-{short}") and i + 1 < len(words):
            return words[i + 1]
        if short and re.match(rf"-{short}=?[^-=]", word.value) and not word.value.startswith("--"):
            value = word.value[2:].removeprefix("=")
            return Word(word.end - len(value), word.end, value)
    return None


def _number(draft: Draft, key: str) -> int | None:
    option = _option(draft.text, key)
    return int(option.value) if option is not None and option.value.isdigit() else None


def _put(draft: Draft, key: str, value: str) -> None:
    """Set an #SBATCH option in place, or on a new line after the last one."""
    text, option = draft.text, _option(draft.text, key)
    if option is not None:
        if option.value != value:
            draft.text = text[: option.start] + value + text[option.end :]
        return
    directives = _directives(text)
    at = directives[-1].end() if directives else text.find("\n") if text.startswith("#!") else 0
    newline = "\r\n" if "\r\n" in text else "\n"
    line = f"#SBATCH --{key}={value}"
    if at <= 0 and not text.startswith("#!"):
        draft.text = line + newline + text
    else:
        draft.text = text[:at].rstrip("\r") + newline + line + text[at - (text[at - 1 : at] == "\r") :]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"
