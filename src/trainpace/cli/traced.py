"""The workload that a verb asks for: traced as its options say, or saved, where options must agree with what was traced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from trainpace.errors import Contradiction
from trainpace.report.progress import Bar
from trainpace.trace import is_saved, load_workload, workload_on_its_way
from trainpace.workload import Form, Variant, Workload


def variant_of(o: dict[str, Any]) -> Variant:
    """The variant that --optimizer, --sequence-length, --image-size and --mode name; not every verb has all."""
    return Variant(o["optimizer"], o["sequence_length"], o["image_size"], mode=o.get("mode") or "train")


def workload_of(
    model: str | Workload, forms: Sequence[Form], variant: Variant, o: dict[str, Any], recompute: bool = False
) -> Workload:
    """The workload of `model`. `recompute`: full activation checkpointing is asked for; where no repeated blocks are found to
    which it could be applied afterwards, the model is traced with it.

    Raises Contradiction where an option asks of a saved workload what it was not traced with.
    """
    with workload_started(model, forms, variant, o, recompute) as workload:
        return workload()


@contextlib.contextmanager
def workload_started(
    model: str | Workload, forms: Sequence[Form], variant: Variant, o: dict[str, Any], recompute: bool = False
) -> Iterator[Callable[[], Workload]]:
    """Start on what `workload_of` gives, and give what waits for it, so that a verb can prepare the rest meanwhile."""
    name = model if isinstance(model, str) else f"this workload of {model.model}"
    if is_saved(model) and o.get("save_workload"):
        raise click.UsageError(f"--save-workload needs a model to trace, and {name} is a saved workload already.")
    with workload_on_its_way(model, forms, variant, o["timeout"]) as traced:

        def workload() -> Workload:
            with Bar(f"tracing {model}"):
                found = traced()
            if is_saved(model):
                check_agrees(name, found, o)
            if not recompute or recomputes(found):
                return found
            if not is_saved(model):
                return load_workload(model, forms, variant._replace(checkpointing=True), o["timeout"])
            raise Contradiction(
                f"{name} was traced without activation checkpointing and has no repeated blocks that could be recomputed.",
                "--checkpointing needs a new trace, from the model.",
            )

        yield workload


def recomputes(workload: Workload) -> bool:
    """Was it traced with recomputation, or has it blocks to which it can be applied in every form?"""
    return workload.checkpointed or all(form.blocks is not None for form in workload.forms.values())


def check_agrees(name: str, workload: Workload, o: dict[str, Any]) -> None:
    """Options beside a saved workload. Raises Contradiction for the first that differs from what was traced."""
    side = re.search(r"(\d+) x (\d+) image$", workload.sample)
    sides = {int(length) for length in side.groups()} if side else set()
    traced = {
        "mode": workload.mode, "optimizer": workload.optimizer, "sequence_length": workload.sequence_length,
        "image_size": sides.pop() if len(sides) == 1 else None,
    }  # fmt: skip
    for setting, was in traced.items():
        if o.get(setting) is None or o[setting] == was:
            continue
        option = f"--{setting.replace('_', '-')}"
        shown = was if was is not None else f"none ({workload.sample})"
        raise Contradiction(
            f"{name} was traced with {option} {shown}, and {option} {o[setting]} needs a new trace, from the model.",
            "Leave the option out, or name the model.",
        )
