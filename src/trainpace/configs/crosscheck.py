"""Settings files compared with each other: the values that they agree on, and the settings that contradict each other."""

from collections.abc import Sequence

from trainpace.configs.settings import AUTOCAST_OF, ConfigFile, Note, Setting
from trainpace.records import Record


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
        if len({s.value for s in settings}) == 1 or (name == "precision" and _compatible(settings, deepspeed)):
            values[name] = settings[0]
        else:
            statements = ", ".join(f"{s.value} in {s.file} ({s.key})" for s in settings)
            clashes.append(Clash(name=name, settings=tuple(settings), text=f"{name} is {statements}."))
    unsure = {clash.name for clash in clashes} | {note.leaves_open for note in notes if note.leaves_open}
    clashes += _world_clashes(values, unsure) + _batch_clashes(values, unsure) + _sharding_clashes(values)
    return Combined(
        files=tuple(file.file for file in files),
        values=values,
        clashes=tuple(clashes),
        notes=(*notes, *_filled_in(notes, values)),
    )


def _compatible(settings: list[Setting], deepspeed: set[str]) -> bool:
    """Hugging Face and accelerate call bf16 autocast what DeepSpeed calls bf16, so the two agree."""
    meanings = {AUTOCAST_OF.get(str(s.value), s.value) for s in settings}
    return any(s.file in deepspeed for s in settings) and len(meanings) == 1


def _filled_in(notes: list[Note], values: dict[str, Setting]) -> list[Note]:
    """Notes on settings that one file leaves open and another states."""
    filled = []
    for note in notes:
        setting = values.get(note.leaves_open or "")
        if setting is not None and (setting.file, setting.key) != (note.file, note.key):
            text = f"{note.key}: taken as {_located(setting)}"
            filled.append(Note(file=note.file, key=note.key, text=text))
    return filled


def _world_clashes(values: dict[str, Setting], unsure: set[str]) -> list[Clash]:
    world, nodes, processes, gpus = (
        values.get(name) for name in ("world_size", "nnodes", "nproc_per_node", "gpus_per_node")
    )
    clashes = []
    if processes and gpus and processes.value != gpus.value:
        text = f"nproc_per_node {_located(processes)} is not the GPUs reserved on a node, {_located(gpus)}."
        clashes.append(Clash(name="nproc_per_node", settings=(processes, gpus), text=text))
    per_node = processes or (None if "nproc_per_node" in unsure else gpus)
    if world and nodes and per_node:
        product = int(nodes.value) * int(per_node.value)
        if world.value != product:
            text = f"world size {_located(world)} is not nnodes {_located(nodes)} x {_located(per_node)} = {product}."
            clashes.append(Clash(name="world_size", settings=(world, nodes, per_node), text=text))
    return clashes


def _batch_clashes(values: dict[str, Setting], unsure: set[str]) -> list[Clash]:
    world, nodes, processes = (values.get(name) for name in ("world_size", "nnodes", "nproc_per_node"))
    if world and not (nodes and processes and world.value != int(nodes.value) * int(processes.value)):
        ranks, used = int(world.value), [world]
    elif processes and "world_size" not in unsure and not world and (nodes or "nnodes" not in unsure):
        # every launcher starts one node where none is stated
        ranks, used = int(processes.value) * int(nodes.value if nodes else 1), [processes, *([nodes] if nodes else [])]
    else:
        return []
    shards = [values[name] for name in ("tp", "pp", "cp") if name in values]
    if unsure & {"tp", "pp", "cp"} - {s.name for s in shards}:
        return []
    divisor = 1
    for shard in shards:
        divisor *= int(shard.value)
    if ranks % divisor:
        factors = " x ".join(_located(shard) for shard in shards)
        text = f"world size {ranks} ({_keys(used)}) is not a multiple of tp x pp x cp = {divisor}, from {factors}."
        return [Clash(name="world_size", settings=(*used, *shards), text=text)]
    total, micro, accumulation = (values.get(name) for name in ("global_batch", "micro_batch", "accumulation"))
    if not (total and micro and accumulation):
        return []
    samples = int(micro.value) * int(accumulation.value) * (ranks // divisor)
    if total.value == samples:
        return []
    text = (
        f"global_batch {_located(total)} is not micro_batch {_located(micro)} x accumulation {_located(accumulation)}"
        f" x data-parallel size {ranks // divisor} ({_keys([*used, *shards])}) = {samples}."
    )
    return [Clash(name="global_batch", settings=(total, micro, accumulation, *used, *shards), text=text)]


def _sharding_clashes(values: dict[str, Setting]) -> list[Clash]:
    zero, sharding = values.get("zero_stage"), values.get("sharding")
    if not (zero and sharding and int(zero.value) > 0):
        return []
    text = f"ZeRO stage {_located(zero)} and FSDP ({sharding.file}, {sharding.key}) are both on; one of them shards."
    return [Clash(name="sharding", settings=(zero, sharding), text=text)]


def _located(setting: Setting) -> str:
    return f"{setting.value} ({setting.file}, {setting.key})"


def _keys(settings: list[Setting]) -> str:
    return "; ".join(f"{s.file}, {s.key}" for s in settings)
