"""Put several files beside each other: what they agree on, and where they clash."""

from __future__ import annotations

from collections.abc import Sequence

from trainpace.configs.settings import ConfigFile, Note, Setting
from trainpace.records import Record

_SAME_UNDER_DEEPSPEED = ({"amp_bf16", "bf16"}, {"amp_fp16", "fp16"})


class Clash(Record):
    """Settings that cannot all be right; `text` is one sentence with every file and key."""

    name: str
    settings: tuple[Setting, ...]
    text: str


class Combined(Record):
    """What all files together say."""

    files: tuple[str, ...]
    values: dict[str, Setting]
    clashes: tuple[Clash, ...]
    notes: tuple[Note, ...]


def combine(files: Sequence[ConfigFile]) -> Combined:
    """Cross-check. `values` holds the settings that do not clash with another statement of the same setting."""
    stated: dict[str, list[Setting]] = {}
    for file in files:
        for setting in file.settings:
            stated.setdefault(setting.name, []).append(setting)
    deepspeed = {file.file for file in files if file.format == "DeepSpeed"}
    values: dict[str, Setting] = {}
    clashes: list[Clash] = []
    for name, settings in stated.items():
        if len({s.value for s in settings}) == 1 or (name == "precision" and _compatible(settings, deepspeed)):
            values[name] = settings[0]
        else:
            said = ", ".join(f"{s.value} in {s.file} ({s.key})" for s in settings)
            clashes.append(Clash(name=name, settings=tuple(settings), text=f"{name} is {said}."))
    clashes += _product_clashes(values)
    return Combined(
        files=tuple(file.file for file in files),
        values=values,
        clashes=tuple(clashes),
        notes=tuple(note for file in files for note in file.notes),
    )


def _compatible(settings: list[Setting], deepspeed: set[str]) -> bool:
    """Hugging Face and accelerate call bf16 autocast what DeepSpeed calls bf16: one setting said in two ways."""
    words = {str(s.value) for s in settings}
    return any(s.file in deepspeed for s in settings) and any(words <= same for same in _SAME_UNDER_DEEPSPEED)


def _product_clashes(values: dict[str, Setting]) -> list[Clash]:
    clashes = []
    world, nodes, processes = (values.get(n) for n in ("world_size", "nnodes", "nproc_per_node"))
    if world and nodes and processes and world.value != int(nodes.value) * int(processes.value):
        product = f"{_said(nodes)} x {_said(processes)} = {int(nodes.value) * int(processes.value)}"
        text = f"world size {_said(world)} is not nnodes {product}."
        clashes.append(Clash(name="world_size", settings=(world, nodes, processes), text=text))
    # every launcher starts one node where none is stated
    started = int(processes.value) * (int(nodes.value) if nodes else 1) if processes else None
    ranks = int(world.value) if world else started
    total, micro, accumulation = (values.get(n) for n in ("global_batch", "micro_batch", "accumulation"))
    if ranks and total and micro and accumulation and not clashes:
        shards = 1
        for name in ("tp", "pp", "cp"):
            shards *= int(values[name].value) if name in values else 1
        used = [s for s in (total, micro, accumulation, world, nodes, processes) if s is not None]
        if ranks % shards:
            text = f"world size {ranks} is not a multiple of tp x pp x cp = {shards}."
            clashes.append(Clash(name="world_size", settings=tuple(used), text=text))
        elif int(total.value) != (samples := int(micro.value) * int(accumulation.value) * (ranks // shards)):
            text = (
                f"global_batch {_said(total)} is not micro_batch {_said(micro)} x accumulation {_said(accumulation)}"
                f" x data-parallel size {ranks // shards} = {samples}."
            )
            clashes.append(Clash(name="global_batch", settings=tuple(used), text=text))
    zero, sharding = values.get("zero_stage"), values.get("sharding")
    if zero and sharding and int(zero.value) > 0:
        text = f"ZeRO stage {_said(zero)} and FSDP ({sharding.file}, {sharding.key}) are both on; one of them shards."
        clashes.append(Clash(name="sharding", settings=(zero, sharding), text=text))
    return clashes


def _said(setting: Setting) -> str:
    return f"{setting.value} ({setting.file}, {setting.key})"
