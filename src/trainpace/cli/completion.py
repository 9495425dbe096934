"""What a shell completes: verbs and scripts, names of cards and models, files. Asked at every press of a key, so nothing heavy.

    eval "$(_TRAINPACE_COMPLETE=bash_source trainpace)"      zsh_source and fish_source likewise

click writes these lines for the shell and asks `_TRAINPACE_COMPLETE=bash_complete trainpace` for what fits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from click.shell_completion import CompletionItem

from trainpace.core.errors import TrainpaceError

if TYPE_CHECKING:
    import click

VARIABLE = "_TRAINPACE_COMPLETE"
PLACES = {"FILE": "file", "PATH": "file", "FOLDER": "dir"}
"""What a metavar that begins so stands for."""


def run(program: click.Group) -> None:
    """Answer the shell and end. A line that means nothing has no completions, and says nothing."""
    try:
        program.main([], prog_name="trainpace", complete_var=VARIABLE)
    except TrainpaceError:
        sys.exit(0)


def verbs_and_scripts(verbs: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """For the first word: the verbs, each with its sentence; models by their beginning; scripts in this folder."""
    items = [
        CompletionItem(verb, help=text)
        for verb, text in verbs.items()
        if verb.startswith(incomplete)
    ]
    models = _models() if incomplete else []
    return [
        *items,
        *(CompletionItem(name) for name in models if name.startswith(incomplete)),
        _place("file", incomplete),
    ]


def values(name: str, metavar: str | None, incomplete: str) -> list[CompletionItem]:
    """For the value of an option or argument: known names, or a file or folder."""
    if name == "gpu":
        from trainpace.core.hardware import catalogue

        # a name with blanks would be two words; with hyphens it is read as well
        names = [device.name.replace(" ", "-") for device in catalogue() if device.kind == "gpu"]
        return _like(names, incomplete)
    if name == "model":
        return [*_like(_models(), incomplete), _place("file", incomplete)]
    if name == "precision":
        from trainpace.core.execution import PRECISIONS

        return _like([*PRECISIONS], incomplete)
    if name == "optimizer":
        from trainpace.core.execution import OPTIMIZERS

        return _like([*OPTIMIZERS], incomplete)
    kind = next((kind for word, kind in PLACES.items() if (metavar or "").startswith(word)), None)
    return [_place(kind, incomplete)] if kind else []


def _place(kind: str, incomplete: str) -> CompletionItem:
    return CompletionItem(incomplete, type=kind)


def _like(names: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


def _models() -> list[Any]:
    from trainpace.workload import packaged_names

    return packaged_names()
