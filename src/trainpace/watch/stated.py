"""How long a training is to be, as the arguments of its own command or the variables of its script say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

EPOCHS = frozenset(
    (
        "epochs",
        "num_epochs",
        "n_epochs",
        "nb_epochs",
        "max_epochs",
        "num_train_epochs",
        "train_epochs",
        "total_epochs",
    )
)
STEPS = frozenset(
    (
        "max_steps",
        "num_steps",
        "n_steps",
        "total_steps",
        "max_train_steps",
        "num_train_steps",
        "train_steps",
        "max_iters",
        "num_iters",
        "n_iters",
        "iterations",
        "train_iters",
        "max_iterations",
        "max_updates",
    )
)
"""Names that scripts give to their numbers of epochs and of optimizer steps: in pytorch/examples, nanoGPT, timm, Lightning,
Hugging Face and Megatron-LM."""
ENDING_STEPS = STEPS - {"num_steps", "n_steps", "num_iters", "n_iters", "iterations"}
"""Those that mean a whole training wherever they stand; the others may be an epoch's steps, or a rollout's."""
_NUMBER = re.compile(r"\d[\d_]*(\.\d+)?([eE]\+?\d{1,3})?")


class StatedLength(NamedTuple):
    """Epochs or steps, and the `words` of the command that say so."""

    epochs: float | None
    steps: int | None
    words: str


def stated_length(command: Sequence[str]) -> StatedLength | None:
    """The last argument that names epochs or steps with a number above 0: `--epochs 30`, `--max-steps=1000`, Hydra's
    `trainer.max_epochs=30`; None where none does. Where both are there, steps, since they are what scripts stop at first.
    """
    found: dict[str, StatedLength] = {}
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not equals and word.startswith("-") and i + 1 < len(command):
            value = command[i + 1]
        if not _NUMBER.fullmatch(value) or not (number := float(value)) or number > 1e15:
            continue
        key = name.lstrip("-+").rpartition(".")[2].replace("-", "_").lower()
        words = word if equals else f"{word} {value}"
        if key in EPOCHS:
            found["epochs"] = StatedLength(number, None, words)
        elif key in STEPS and number.is_integer():
            found["steps"] = StatedLength(None, int(number), words)
    return found.get("steps") or found.get("epochs")
