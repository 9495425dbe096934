"""Options in Python's words, as the command line would take them: so that types, checks and defaults stand once, on the commands.

`num_gpus=8` is `--num-gpus=8`, `gpu=["T4", "A100"]` is `--gpu=T4 --gpu=A100`, `batch=range(1, 71)` is `--batch=1,2,...,70`,
`compile=True` is `--compile`, `timeout=300` is `--timeout=300s`. None and False are options that are not given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import click

from trainpace.cli.options import BATCHES, WORKERS
from trainpace.errors import TrainpaceError, UnknownName

_LISTS = (BATCHES, WORKERS)


def options_of(command: click.Command, keywords: type, given: Mapping[str, Any], *arguments: str) -> dict[str, Any]:
    """The parameters that `command` gets for these options and arguments, by the command's own names.

    `keywords`: the TypedDict of those that a function takes. Those that are no options of the command, such as `loss`, go by.
    Raises TrainpaceError for an option that is not among them, or a value that the command does not take.
    """
    wanted = get_type_hints(keywords)
    options = names_of(command)
    texts = []
    for name, value in given.items():
        if name not in wanted:
            raise UnknownName("option", name, wanted, f"See help(trainpace.api.options.{keywords.__name__}).")
        if name in options:
            texts += list(_texts(options[name], value))
    with in_our_words():
        own_answer = ["--json"] if "json" in _long_names(command) else []
        context = command.make_context(command.name, [*texts, *own_answer, "--", *arguments])
        return context.params


def names_of(command: click.Command) -> dict[str, click.Option]:
    """The options of a command as keywords: `--num-gpus` is num_gpus."""
    return {name.replace("-", "_"): option for name, option in _long_names(command).items()}


@contextlib.contextmanager
def in_our_words() -> Iterator[None]:
    """What click says of misuse, as a TrainpaceError."""
    try:
        yield
    except click.ClickException as error:
        raise TrainpaceError(error.format_message()) from None


def _long_names(command: click.Command) -> dict[str, click.Option]:
    options = [p for p in command.params if isinstance(p, click.Option)]
    return {o.opts[-1].removeprefix("--"): o for o in options}


def _texts(option: click.Option, value: Any) -> Iterator[str]:
    """A value as arguments of the command line. Raises TrainpaceError for True where a value is needed."""
    word = option.opts[-1]
    if value is None or value is False:
        return
    if value is True:
        if not (option.is_flag or option._flag_needs_value):  # it would take the next option for its value
            raise TrainpaceError(f"{word} takes a value.", f"It takes {option.type.name}, not True.")
        yield word
    elif option.multiple:
        several = [value] if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable) else value
        yield from (f"{word}={_text(option, one)}" for one in several)
    elif option.type in _LISTS and isinstance(value, Iterable) and not isinstance(value, str):
        yield f"{word}={','.join(str(one) for one in value)}"
    else:
        yield f"{word}={_text(option, value)}"


def _text(option: click.Option, value: Any) -> str:
    if isinstance(value, int | float) and getattr(option.type, "name", "") == "duration":
        return f"{value!r}s"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
