"""Launch commands, and the Hugging Face flags of the script that they start."""

from collections.abc import Mapping

from trainpace.configs.draft import ELSEWHERE, Draft
from trainpace.configs.huggingface import DISTINCTIVE
from trainpace.configs.launch_words import Flag, Launch, find_launch, with_flag, with_value, without
from trainpace.configs.settings import Value
from trainpace.configs.writers.accelerate import COMPILED, MEETING, NO_DYNAMO, precision_word
from trainpace.configs.writers.huggingface import NAMES_OF, argument, formats_on
from trainpace.errors import UnreadableInput

_WORLD = {
    "torchrun": {"nnodes": "--nnodes", "nproc_per_node": "--nproc-per-node"},
    "deepspeed": {"nnodes": "--num_nodes", "nproc_per_node": "--num_gpus"},
    "accelerate": {"world_size": "--num_processes", "nnodes": "--num_machines"},
}
_OWN = {"accumulation": "--gradient_accumulation_steps", "tp": "--parallelism_config_tp_size",
        "cp": "--parallelism_config_cp_size"}  # fmt: skip
_ALIASES = {"--num_gpus": ("num-gpus", "num-accelerators")}
_OFFLOADS = {"offload_optimizer": "--offload_optimizer_device", "offload_parameters": "--offload_param_device"}
_MEETINGS = {
    "torchrun": "on several nodes torchrun is started on each of them, with one --rdzv-endpoint",
    "accelerate": MEETING,
    "deepspeed": "on several nodes deepspeed needs a --hostfile",
}
_NO_FLAG = "the launch command has no flag for it"


def write_command(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    launch = _launch_of(draft)
    script = _is_hugging_face(launch)
    _write_world(draft, names, want)
    for name in sorted(names & NAMES_OF.keys()):
        if script:
            _write_argument(draft, name, want[name])
    if "precision" in names and script:
        _write_formats(draft, str(want["precision"]))
    if launch.name == "accelerate":
        _write_accelerate(draft, names, want)
    note_meeting(draft, names, want)
    for name in sorted(names - draft.wrote - draft.left.keys() - {"world_size", "gpus_per_node", "global_batch"}):
        draft.leave(name, _NO_FLAG)


def note_meeting(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    """Note what a launcher needs on several nodes, where its command does not have it."""
    launch = _launch_of(draft)
    meets = launch.flags.keys() & {"rdzv-endpoint", "master-addr", "main-process-ip", "hostfile", "H", "config-file"}
    if "nnodes" in draft.wrote & names and want["nnodes"] != 1 and not meets:
        draft.note(_MEETINGS.get(launch.name, _MEETINGS["torchrun"]))


def _launch_of(draft: Draft) -> Launch:
    launch = find_launch(draft.text)
    if launch is None:
        raise UnreadableInput(f"{draft.file} holds no launch command that can be changed.")
    return launch


def _is_hugging_face(launch: Launch) -> bool:
    return bool(launch.script.keys() & (DISTINCTIVE | {"max_steps"}))


def _place(draft: Draft, name: str, written: str, value: str, adds: bool = True) -> bool:
    """Write a launcher's flag; returns whether the command now has it."""
    launch = _launch_of(draft)
    flag = _flag(launch, written)
    if flag is not None and flag.value is not None:
        old = flag.value.value
        if "$" in old or ":" in old or (name == "nproc_per_node" and not old.isdigit()):
            draft.leave(name, f"{flag.written} is {old}, whose value is known only when it runs")
            return False
        if old != value:
            draft.text = with_value(draft.text, flag, value)
    elif not adds or name not in draft.may_add:
        if name not in draft.may_add:
            draft.leave(name, ELSEWHERE)
        return False
    else:
        draft.text = with_flag(draft.text, launch.flags_end, launch.flags, written, value)
    draft.wrote.add(name)
    draft.left.pop(name, None)
    return True


def _flag(launch: Launch, written: str) -> Flag | None:
    names = _ALIASES.get(written, (written.lstrip("-").replace("_", "-"),))
    return next((launch.flags[name] for name in names if name in launch.flags), None)


def _write_world(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    launch = _launch_of(draft)
    flags = _WORLD.get(launch.name, _WORLD["torchrun"])
    include = next((launch.flags[key] for key in ("include", "i") if key in launch.flags), None)
    if launch.name == "accelerate" and names & {"nnodes", "nproc_per_node"}:
        names |= {"world_size"}
    for name, written in flags.items():
        if name not in names:
            continue
        if include is not None and launch.name == "deepspeed":
            draft.leave(name, f"{include.written} names the GPUs: say by hand which")
        else:
            needed = name != "nnodes" or want["nnodes"] != 1
            if not _place(draft, name, written, str(want[name]), adds=needed) and name not in draft.left:
                draft.wrote.add(name)  # one node is what a launcher starts
    if launch.name == "accelerate":
        if "world_size" in draft.wrote:
            draft.wrote |= names & {"nproc_per_node"}
        multi = _launch_of(draft).flags.get("multi-gpu")
        if multi is not None and want["world_size"] == 1 and "world_size" in names:
            draft.text = without(draft.text, multi)


def _write_accelerate(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    script = _is_hugging_face(_launch_of(draft))
    for name, written in _OWN.items():
        if name in names and name not in draft.wrote:
            _place(draft, name, written, str(want[name]), adds=name == "accumulation")
    if "precision" in names and (not script or "mixed-precision" in _launch_of(draft).flags):
        word, why = precision_word(str(want["precision"]), draft.beside)
        if why:
            draft.leave("precision", why)
        else:
            _place(draft, "precision", "--mixed_precision", word)
    if "compile" in names and "compile" not in draft.wrote and "use-deepspeed" in _launch_of(draft).flags:
        draft.leave("compile", NO_DYNAMO)
    elif "compile" in names and "compile" not in draft.wrote:
        _place(draft, "compile", "--dynamo_backend", "inductor" if want["compile"] else "no")
    if "activation_checkpointing" in names and "use-fsdp" in _launch_of(draft).flags:
        value, why = argument("activation_checkpointing", want["activation_checkpointing"])
        if not why:
            _place(draft, "activation_checkpointing", "--fsdp_activation_checkpointing", str(value).lower())
    sharded = names & {"zero_stage", *_OFFLOADS}
    if sharded:
        _write_sharding(draft, sharded, want)


def _write_sharding(draft: Draft, names: frozenset[str], want: Mapping[str, Value]) -> None:
    launch, stage = _launch_of(draft), int(want["zero_stage"])
    if "use-fsdp" in launch.flags:
        if stage == 3:
            draft.wrote |= names & {"zero_stage"}
        reason = "FSDP shards here (--use_fsdp), in a way of its own"
        draft.leave_all(names - draft.wrote, dict.fromkeys(names, reason))
        return
    needed = stage or any(want[name] for name in _OFFLOADS)
    if "use-deepspeed" not in launch.flags and _flag(launch, "--zero_stage") is None:
        if not needed or "zero_stage" not in draft.may_add:
            if needed:
                draft.leave_all(names, dict.fromkeys(names, ELSEWHERE))
            else:
                draft.wrote |= names  # as it is where nothing is said
            return
        dynamo = _flag(launch, "--dynamo_backend")
        if dynamo is not None and dynamo.value is not None and dynamo.value.value.casefold() != "no":
            draft.leave_all(names, dict.fromkeys(names, COMPILED))
            return
        draft.text = with_flag(draft.text, launch.flags_end, launch.flags, "--use_deepspeed", None)
        multi = _launch_of(draft).flags.get("multi-gpu")
        if multi is not None:  # accelerate takes one of the two
            draft.text = without(draft.text, multi)
    if "zero_stage" in names:
        _place(draft, "zero_stage", "--zero_stage", str(stage))
    for name, written in _OFFLOADS.items():
        flag = _flag(_launch_of(draft), written)
        old = None if flag is None or flag.value is None else flag.value.value
        if name in names and ((old is None and not want[name]) or (old == "nvme" and want[name])):
            draft.wrote.add(name)
        elif name in names:
            _place(draft, name, written, "cpu" if want[name] else "none")


def _write_argument(draft: Draft, name: str, wanted: Value) -> None:
    value, why = argument(name, wanted)
    if why:
        draft.leave(name, why)
        return
    script = _launch_of(draft).script
    key = next((key for key in NAMES_OF[name] if key in script), NAMES_OF[name][-1])
    _place_in_script(draft, name, key, value)


def _place_in_script(draft: Draft, name: str, key: str, value: Value) -> None:
    launch = _launch_of(draft)
    flag = launch.script.get(key)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if flag is not None and flag.value is not None and "$" in flag.value.value:
        draft.leave(name, f"{flag.written} is {flag.value.value}, whose value is known only when it runs")
        return
    if flag is not None:
        old = "true" if flag.value is None else flag.value.value
        if old.casefold() != text:
            draft.text = with_value(draft.text, flag, text)
    elif name in draft.may_add:
        draft.text = with_flag(draft.text, launch.script_end, launch.script, f"--{key}", text)
    else:
        draft.leave(name, ELSEWHERE)
        return
    draft.wrote.add(name)


def _write_formats(draft: Draft, precision: str) -> None:
    on, why = formats_on(precision, draft.beside)
    script = _launch_of(draft).script
    if not any(key in script for key in on) and "precision" not in draft.may_add:
        why = why or ELSEWHERE
    if why:
        draft.leave("precision", why)
        return
    for key, state in on.items():
        if key in script or state or (precision == "fp32" and key != "tf32"):
            before = draft.may_add
            draft.may_add = before | {"precision"}
            _place_in_script(draft, "precision", key, state)
            draft.may_add = before
