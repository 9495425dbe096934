"""Launch commands: torchrun, python -m torch.distributed.run, accelerate launch, deepspeed, srun python."""

from __future__ import annotations

import re
import shlex

from trainpace.configs.settings import ConfigFile, Reading, SettingName
from trainpace.errors import UnreadableInput

_TORCHRUN: dict[str, SettingName] = {"nnodes": "nnodes", "nproc-per-node": "nproc_per_node"}
_LAUNCHERS: dict[str, dict[str, SettingName]] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate": {"num-processes": "world_size", "num-machines": "nnodes",
                   "gradient-accumulation-steps": "accumulation", "zero-stage": "zero_stage"},
    "deepspeed": {"num-nodes": "nnodes", "num-gpus": "nproc_per_node", "num-accelerators": "nproc_per_node"},
}  # fmt: skip
_SCRIPT_FLAGS: dict[str, SettingName] = {
    "per-device-train-batch-size": "micro_batch",
    "gradient-accumulation-steps": "accumulation",
    "max-steps": "max_steps",
}
_TAKES_VALUE = re.compile(r"^-{1,2}[A-Za-z]")


def parse_command(command: str, file: str = "command") -> ConfigFile:
    """Settings of a launch command given as text. Raises where it holds no launcher that is known."""
    found = read_launch(command, Reading(file, "launch command"))
    if found is None:
        raise UnreadableInput(
            f"{file}: {command[:60]!r} is no launch command that is understood.",
            f"Known: {', '.join(_LAUNCHERS)}.",
        )
    return found.done()


def read_launch(text: str, reading: Reading) -> Reading | None:
    """Put what the first launcher in `text` says into `reading`; None where there is no launcher."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UnreadableInput(
            f"{reading.file}: the command cannot be split into words: {str(error).lower()}."
        ) from None
    names = [word.rpartition("/")[2] for word in words]
    at = next((i for i, name in enumerate(names) if name in _LAUNCHERS), None)
    if at is None or (names[at] == "accelerate" and names[at + 1 : at + 2] != ["launch"]):
        return None
    flags = _LAUNCHERS[names[at]]
    seen: dict[str, str] = {}
    i = at + 1
    in_script = False
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("-"):
            in_script = in_script or word.endswith((".py", ".sh")) or ("/" in word and not seen)
            continue
        key, has_value, value = word.lstrip("-").partition("=")
        key = key.replace("_", "-")
        table = _SCRIPT_FLAGS if in_script else flags
        if key == "m" and not in_script:
            in_script = True
            continue
        if key not in table:
            continue
        if not has_value:
            if i >= len(words) or _TAKES_VALUE.match(words[i]):
                raise UnreadableInput(f"{reading.file}: {word} has no value.")
            value = words[i]
            i += 1
        if key in seen and seen[key] != value:
            raise UnreadableInput(f"{reading.file}: {word} is given twice, as {seen[key]} and {value}.")
        if key not in seen:
            _put(reading, table[key], value, f"--{key}")
        seen[key] = value
    if names[at].startswith("torch") and "nproc-per-node" not in seen:
        reading.note("--nproc-per-node", "not stated; torchrun would start 1 process a node")
    return reading


def _put(reading: Reading, name: SettingName, value: str, key: str) -> None:
    if "$" in value:
        reading.note(key, f"{value} is known only when it runs")
    elif re.fullmatch(r"\d+:\d+", value):
        low, high = value.split(":")
        if low == high:
            reading.count(name, int(low), key)
        else:
            reading.note(key, f"elastic, {low} to {high} nodes: the number is not known here")
    elif value in ("gpu", "cpu", "auto", "xpu"):
        reading.note(key, f"{value}: as many as the machine has, which is not known here")
    elif not re.fullmatch(r"\d+", value):
        raise reading.fail(key, value, "a whole number")
    else:
        reading.count(name, int(value), key, least=0 if name == "zero_stage" else 1)
