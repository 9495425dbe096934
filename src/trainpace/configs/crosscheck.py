"""Settings files compared with each other: the values that they agree on, and the settings that contradict each other."""

import math
from collections.abc import Sequence

from trainpace.configs.settings import AUTOCAST_OF, ConfigFile, Note, Setting
from trainpace.core.errors import Contradiction
from trainpace.core.records import Record


class Clash(Record):
    """Settings that cannot all be right; `text` is one sentence that names every file and key."""

    name: str
    settings: tuple[Setting, ...]
    text: str


class Combined(Record):
    files: tuple[str, ...]
    values: dict[str, Setting]
    clashes: tuple[Clash, ...]
    notes: tuple[Note, ...]


def combine(files: Sequence[ConfigFile]) -> Combined:
    """Cross-check files. `values` holds every setting that all files which state it agree on."""
    stated: dict[str, list[Setting]] = {}
    for file in files:
        for setting in file.settings:
            stated.setdefault(setting.name, []).append(setting)
    deepspeed = {file.file for file in files if file.format == "DeepSpeed"}
    notes = [note for file in files for note in file.notes]
    values: dict[str, Setting] = {}
    clashes: list[Clash] = []
    for name, settings in stated.items():
        different = {s.value for s in settings}
        if name == "precision" and any(s.file in deepspeed for s in settings):
            different = {AUTOCAST_OF.get(str(value), value) for value in different}
        if len(different) == 1:
            values[name] = settings[0]
        else:
            statements = ", ".join(f"{s.value} in {s.file} ({s.key})" for s in settings)
            clashes.append(
                Clash(name=name, settings=tuple(settings), text=f"{name} is {statements}.")
            )
    unsure = {clash.name for clash in clashes} | {
        note.leaves_open for note in notes if note.leaves_open
    }
    clashes += _counted_clashes(values, unsure)
    zero, sharding = values.get("zero_stage"), values.get("sharding")
    if zero and sharding and zero.value:
        text = (
            f"ZeRO stage {_located(zero)} and FSDP ({_keys([sharding])}) are both on; one of them"
            " shards."
        )
        clashes.append(Clash(name="sharding", settings=(zero, sharding), text=text))
    return Combined(
        files=tuple(file.file for file in files),
        values=values,
        clashes=tuple(clashes),
        notes=(*notes, *_filled_in(notes, values)),
    )


def agreed(files: Sequence[ConfigFile]) -> Combined:
    """`combine`, which raises `Contradiction` with every clash where the files disagree."""
    combined = combine(files)
    if combined.clashes:
        text = "the files contradict each other: " + " ".join(
            clash.text for clash in combined.clashes
        )
        raise Contradiction(text, "Make them agree, then ask again.")
    return combined


def _filled_in(notes: list[Note], values: dict[str, Setting]) -> list[Note]:
    """Notes on settings that one file leaves open and another states."""
    stated = [
        (note, values[note.leaves_open])
        for note in notes
        if note.leaves_open and note.leaves_open in values
    ]
    return [
        Note(file=note.file, key=note.key, text=f"{note.key}: taken as {_located(setting)}")
        for note, setting in stated
        if (setting.file, setting.key) != (note.file, note.key)
    ]


def _counted_clashes(values: dict[str, Setting], unsure: set[str]) -> list[Clash]:
    """Processes that are not nodes x processes of each, and samples that are not micro-batches x ranks. `unsure`: settings
    that clash or whose values are not known here."""
    world, nodes, processes, gpus, total, micro, accumulation = (
        values.get(name)
        for name in (
            "world_size",
            "nnodes",
            "nproc_per_node",
            "gpus_per_node",
            "global_batch",
            "micro_batch",
            "accumulation",
        )
    )
    clashes = []
    if processes and gpus and processes.value != gpus.value:
        text = (
            f"nproc_per_node {_located(processes)} is not the GPUs reserved on a node,"
            f" {_located(gpus)}."
        )
        clashes.append(Clash(name="nproc_per_node", settings=(processes, gpus), text=text))
    per_node = processes or (None if "nproc_per_node" in unsure else gpus)
    if (
        world
        and nodes
        and per_node
        and world.value != (product := int(nodes.value) * int(per_node.value))
    ):
        text = (
            f"world size {_located(world)} is not nnodes {_located(nodes)} x {_located(per_node)} ="
            f" {product}."
        )
        clashes.append(Clash(name="world_size", settings=(world, nodes, per_node), text=text))
        if processes:
            return clashes
    if world:
        ranks, used = int(world.value), [world]
    elif processes and "world_size" not in unsure and (nodes or "nnodes" not in unsure):
        # every launcher starts one node where none is stated
        ranks, used = (
            int(processes.value) * int(nodes.value if nodes else 1),
            [processes, *([nodes] if nodes else [])],
        )
    else:
        return clashes
    shards = [values[name] for name in ("tp", "pp", "cp") if name in values]
    if unsure & {"tp", "pp", "cp"} - {s.name for s in shards}:
        return clashes
    divisor = math.prod(int(shard.value) for shard in shards)
    if ranks % divisor:
        factors = " x ".join(_located(shard) for shard in shards)
        text = (
            f"world size {ranks} ({_keys(used)}) is not a multiple of tp x pp x cp = {divisor},"
            f" from {factors}."
        )
        clashes.append(Clash(name="world_size", settings=(*used, *shards), text=text))
    elif total and micro and accumulation:
        samples = int(micro.value) * int(accumulation.value) * (ranks // divisor)
        text = (
            f"global_batch {_located(total)} is not micro_batch {_located(micro)} x accumulation"
            f" {_located(accumulation)} x data-parallel size {ranks // divisor}"
            f" ({_keys([*used, *shards])}) = {samples}."
        )
        if total.value != samples:
            clashes.append(
                Clash(
                    name="global_batch",
                    settings=(total, micro, accumulation, *used, *shards),
                    text=text,
                )
            )
    return clashes


def _located(setting: Setting) -> str:
    return f"{setting.value} ({setting.file}, {setting.key})"


def _keys(settings: list[Setting]) -> str:
    return "; ".join(f"{s.file}, {s.key}" for s in settings)
