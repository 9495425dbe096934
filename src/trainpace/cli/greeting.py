"""What `trainpace` alone says: three commands to begin with, and what machine this is."""

from __future__ import annotations

import importlib.metadata

from trainpace.report import Headline, Lines, Named, show

EXAMPLES = (
    (
        "trainpace train.py --epochs 30",
        "How long will my script take here, what slows it down, what would it cost elsewhere?",
    ),
    (
        "trainpace resnet50 --batch 64",
        "How fast is this model on GPUs that I do not have? Also: a transformers config.json.",
    ),
    ("trainpace doctor", "Is this machine in order, and does measuring work on it?"),
)


def greet() -> None:
    question = (
        "How long will this training take, what will it cost, why, and how do I make it faster?"
    )
    machine = Lines([*_machine(), "All verbs: trainpace --help"])
    show([Headline(question), Named("", EXAMPLES), machine])


def _machine() -> list[str]:
    """This machine in a line or two, without torch, whose import would take a second."""
    from trainpace.measure import detect

    found = detect()
    cores = found.cpu.logical_cores
    gpus = ", ".join(gpu.name or "a GPU" for gpu in found.gpus) or "no NVIDIA GPU"
    memory = "" if found.memory_gib is None else f", {found.memory_gib:.0f} GiB"
    problem = [f"The GPU's driver: {found.gpu_problem}"] if found.gpu_problem else []
    try:
        torch = f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no torch"
    return [
        (
            f"This machine: {found.cpu.name} ({cores} cores{memory}), {gpus}; Python"
            f" {found.python}, {torch}."
        ),
        *problem,
    ]
