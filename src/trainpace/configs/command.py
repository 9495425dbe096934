"""Settings in launch commands: torchrun, python -m torch.distributed.run, accelerate launch, deepspeed; and in the Hugging
Face flags of the script that they start."""

import re
from typing import Any

from trainpace.configs.accelerate import (
    MEETING,
    NO_DYNAMO,
    PRECISION,
    may_start_deepspeed,
    precision_word,
    read_dynamo,
)
from trainpace.configs.changes import SHARDING, Draft
from trainpace.configs.huggingface import (
    DISTINCTIVE,
    NAMES,
    put_training_arguments,
    write_arguments,
)
from trainpace.configs.launch import (
    ACCELERATE,
    DEEPSPEED,
    TORCHRUN,
    Launch,
    find_launch,
    is_open,
    with_flag,
    without,
)
from trainpace.configs.settings import ConfigFile, Reading, SettingName
from trainpace.configs.syntax import LARGEST_FILE_BYTES
from trainpace.core.errors import UnreadableInput

_SCRIPT_FLAGS = NAMES | DISTINCTIVE | {"deepspeed_config"}
_MEETS = ("rdzv-endpoint", "master-addr", "main-process-ip", "hostfile", "H", "config-file")
_MEETINGS = {
    "torchrun": "on several nodes torchrun is started on each of them, with one --rdzv-endpoint",
    "accelerate": MEETING,
    "deepspeed": "on several nodes deepspeed needs a --hostfile",
}


def parse_command(command: str, file: str = "command") -> ConfigFile:
    """Settings of a launch command. Raises UnreadableInput for a text without a known launcher."""
    if len(command) > LARGEST_FILE_BYTES:
        raise UnreadableInput(f"{file} is larger than 1 MiB, which no launch command is.")
    launch = find_launch(command, file)
    if launch is None:
        launchers = "torchrun, python -m torch.distributed.run, accelerate launch, deepspeed"
        text = f"{file}: {command[:60]!r} is not a known launch command."
        raise UnreadableInput(text, f"Known: {launchers}.")
    return read_launch(launch, Reading(file, "launch command")).done()


def read_launch(launch: Launch, reading: Reading) -> Reading:
    seen: dict[str, str | None] = {}
    for flag in launch.flags:
        name, value = flag.name, None if flag.value is None else flag.value.value
        key = f"--{name}" if len(name) > 1 else f"-{name}"
        if value is None and name not in launch.launcher.alone:
            raise UnreadableInput(f"{reading.file}: {flag.written} has no value.")
        if seen.get(name, value) != value:
            raise UnreadableInput(
                f"{reading.file}: {key} is given twice, as {seen[name]} and {value}."
            )
        if name == "dynamo-backend" and launch.flag("use-deepspeed"):
            reading.note(
                key, "without effect: accelerate does not pass it on where it starts DeepSpeed"
            )
        elif name in launch.launcher.reads and name not in seen:
            _read_flag(reading, launch.launcher.reads[name], value, key)
        seen[name] = value
    if launch.launcher.others is not None:
        flag_names = launch.launcher.reads.keys() | launch.launcher.alone | launch.launcher.others
        reading.flag_unknown(seen, flag_names, "not a flag of this launcher", "--")
    for name in ("config-file", "deepspeed-config-file"):
        if file := seen.get(name):
            reading.note_file(f"--{name}", file)
    _read_script(launch, reading)
    if launch.launcher is TORCHRUN and "nproc-per-node" not in seen:
        reading.note("--nproc-per-node", "not stated; torchrun would start 1 process a node")
    elif launch.launcher is ACCELERATE and "num-processes" not in seen:
        text = "not stated; accelerate takes it from its configuration file, or every GPU it finds"
        reading.note("--num_processes", text, leaves_open="world_size")
    elif launch.launcher is DEEPSPEED and not seen.keys() & launch.launcher.reads.keys() - {
        "num-nodes"
    }:
        text = "not stated; DeepSpeed would take every GPU it finds"
        reading.note("--num_gpus", text, leaves_open="nproc_per_node")
    return reading


def _read_flag(reading: Reading, name: SettingName, value: str | None, key: str) -> None:
    if value is None:  # of the flags that are read, only --use-fsdp stands alone
        reading.put("sharding", "fsdp", key)
    elif is_open(value):
        reading.note(key, f"{value} is known only when it runs", leaves_open=name)
    elif name == "nnodes" and (span := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)):
        low, high = span.groups()
        if low == high:
            reading.read(name, int(low), key)
        else:
            text = f"{value} is elastic, {low} to {high} nodes: the number is not known here"
            reading.note(key, text, leaves_open=name)
    elif name == "nproc_per_node" and value in ("gpu", "cpu", "auto", "xpu"):
        reading.note(
            key, f"{value}: as many as the machine has, which is not known here", leaves_open=name
        )
    elif key in ("--include", "-i"):
        _read_include(reading, value, key)
    elif name == "precision":
        reading.put(name, PRECISION[reading.word(value.casefold(), key, PRECISION) or "no"], key)
    elif name == "activation_checkpointing":
        reading.put(name, reading.word(value.casefold(), key, ("true", "false")) == "true", key)
    elif name in SHARDING[1:]:
        reading.read_device(name, value, key)
    elif name == "compile":
        read_dynamo(reading, value, key)
    elif not re.fullmatch(r"[0-9]{1,15}", value):
        raise reading.fail(key, value, "a whole number")
    else:
        reading.read(name, int(value), key)


def _read_include(reading: Reading, value: str, key: str) -> None:
    """Read the GPU indices of every node from DeepSpeed's `host:0,1,2@other:0,1,2`."""
    slots = [node.partition(":")[2] for node in value.split("@")]
    counts = {len(indices.split(",")) for indices in slots if indices}
    if "" not in slots and len(counts) == 1:
        reading.put("nproc_per_node", counts.pop(), key)
        reading.put("nnodes", len(slots), key)
    else:
        text = f"{value}: not the same number of GPUs on every node, or all of them"
        reading.note(key, text, leaves_open="nproc_per_node")


def _read_script(launch: Launch, reading: Reading) -> None:
    """Read Hugging Face's arguments among the script's flags: `--flag value`, `--flag=value` or `--flag`."""
    arguments: dict[str, Any] = {}
    for flag in launch.script:
        name, value = flag.name.replace("-", "_"), flag.value
        if name not in _SCRIPT_FLAGS:
            continue
        if name in ("deepspeed", "deepspeed_config"):
            if value is not None and value.value.endswith(".json"):
                reading.note_file(flag.written, value.value)
        elif value is not None and is_open(value.value):
            reading.note(flag.written, f"{value.value} is known only when it runs")
        else:
            read = True if value is None else _scalar(value.value)
            if arguments.get(name, read) != read:
                text = f"{flag.written} is given twice, as {arguments[name]} and {read}."
                raise UnreadableInput(f"{reading.file}: {text}")
            arguments[name] = read
    if arguments.keys() & (DISTINCTIVE | {"max_steps"}):
        put_training_arguments(reading, arguments, "--")


def _scalar(text: str) -> Any:
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_command(draft: Draft) -> None:
    _write_world(draft)
    script = any(draft.get(name) is not None for name in (*DISTINCTIVE, "max_steps"))
    if script:
        write_arguments(draft)
    if draft.launch.name == "accelerate":
        _write_accelerate(draft, script)
    note_meeting(draft)
    draft.leave_rest("the launch command has no flag for it")


def note_meeting(draft: Draft) -> None:
    """Note what a launcher needs on several nodes, where its command does not have it."""
    launch = draft.launch
    if (
        "nnodes" in draft.wrote & draft.names
        and draft.want["nnodes"] != 1
        and not launch.flag(*_MEETS)
    ):
        draft.note(_MEETINGS.get(launch.name, _MEETINGS["torchrun"]))


def _flag_of(draft: Draft, setting: str) -> str:
    """The launcher's flag for a setting: the one that is given, else the usual one."""
    launch = draft.launch
    names = launch.names_of(setting)
    name = next((name for name in names if launch.flag(name)), names[0])
    return f"--{name if launch.launcher is TORCHRUN else name.replace('-', '_')}"


def _write_world(draft: Draft) -> None:
    launch = draft.launch
    if launch.name == "accelerate" and draft.names & {"nnodes", "nproc_per_node"}:
        draft.names |= {"world_size"}
    include = launch.flag("include", "i") if launch.name == "deepspeed" else None
    for name in ("world_size", "nnodes", "nproc_per_node"):
        if name not in launch.launcher.reads.values():
            continue
        if include is not None:
            draft.leave(f"{include.written} names the GPUs: say by hand which", name)
            continue
        draft.place(name, _flag_of(draft, name), adds=name != "nnodes" or draft.want["nnodes"] != 1)
        if name not in draft.left:
            draft.keep(name)  # one node is what a launcher starts
    if launch.name == "accelerate":
        if "world_size" in draft.wrote:
            draft.keep("nproc_per_node")
        if draft.want["world_size"] == 1 and "world_size" in draft.names:
            _drop_multi_gpu(draft)


def _drop_multi_gpu(draft: Draft) -> None:
    if multi := draft.launch.flag("multi-gpu"):
        draft.text = without(draft.text, multi)


def _write_accelerate(draft: Draft, script: bool) -> None:
    for name in ("accumulation", "tp", "cp"):
        if name not in draft.wrote:
            draft.place(name, _flag_of(draft, name), adds=name == "accumulation")
    launch = draft.launch
    if (not script or launch.flag("mixed-precision")) and (word := precision_word(draft)):
        draft.place("precision", "--mixed_precision", word)
    if "compile" not in draft.wrote:
        if launch.flag("use-deepspeed"):
            draft.leave(NO_DYNAMO, "compile")
        else:
            draft.place(
                "compile", "--dynamo_backend", "inductor" if draft.want["compile"] else "no"
            )
    checkpointing = draft.want["activation_checkpointing"]
    if launch.flag("use-fsdp") and checkpointing != "selective":
        draft.place(
            "activation_checkpointing", "--fsdp_activation_checkpointing", checkpointing == "full"
        )
    if draft.names & set(SHARDING):
        _write_sharding(draft)


def _write_sharding(draft: Draft) -> None:
    launch = draft.launch
    if launch.flag("use-fsdp"):
        if draft.want["zero_stage"] == 3:
            draft.keep("zero_stage")
        draft.leave(
            "FSDP shards here (--use_fsdp), in a way of its own", *(set(SHARDING) - draft.wrote)
        )
        return
    if not launch.flag("use-deepspeed", "zero-stage"):
        if not may_start_deepspeed(draft, draft.get("--dynamo_backend")):
            return
        draft.text = with_flag(draft.text, launch.flags_end, launch.flags, "--use_deepspeed", None)
        _drop_multi_gpu(draft)  # accelerate takes one of the two
    draft.place("zero_stage", "--zero_stage")
    for name in SHARDING[1:]:
        draft.place_device(name, _flag_of(draft, name))
