"""Command group of the program, handling of its errors, and incomplete command lines.

Without a command, a script runs `look`, a model `forecast`, a settings file `schedule` and a trace
`diagnose`. For shell completion, click runs the program at every key press through
`_TRAINPACE_COMPLETE`. Heavy imports are therefore inside functions. To enable completion:

    eval "$(_TRAINPACE_COMPLETE=bash_source trainpace)"      (zsh_source and fish_source likewise)
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from trainpace.core.errors import TrainpaceError, nearest_names, os_reason
from trainpace.report import never_fail_to_encode, open_closed_streams, tell
from trainpace.verbs import SUMMARIES as VERBS

MODULES = {
    "forecasting": ("forecast", "match", "offers", "gpus", "plan", "validate", "schedule"),
    "journal_commands": ("journal", "serve"),
}
"""Modules of the commands. All other commands are in `measuring`."""
GARBAGE_EVERY = 100_000
"""Allocations between garbage collections. Python's default, 700, costs 10% of the run time.
"""


class _Verbs(click.Group):
    """Command group that imports only the command that runs, which keeps `--help` fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        from trainpace.cli.command import command_of

        home = next((module for module, verbs in MODULES.items() if cmd_name in verbs), "measuring")
        command = getattr(importlib.import_module(f"trainpace.cli.{home}"), cmd_name)
        return command if isinstance(command, click.Group) else command_of(command)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-"):
            from trainpace.cli.program import names_a_script

            own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
            if args[0].partition("=")[0] not in own and names_a_script(args):
                args = ["look", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from trainpace.cli.program import meant

            args = meant(args, tuple(VERBS))
        elif args[:1] == ["diagnose"]:
            from trainpace.cli.program import place_last

            args = place_last(args)
        elif args[:1] == ["schedule"]:
            from trainpace.cli.program import as_config

            args = as_config(args)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from trainpace.cli.program import verbs_and_scripts

        options = click.Command.shell_complete(
            self, ctx, incomplete
        )  # The group's own method would import every command.
        return [*options, *verbs_and_scripts(VERBS, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (
            BrokenPipeError
        ):  # The reader, such as `head`, has closed the pipe. click would exit with 1.
            _discard_output()
            return 0

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="trainpace", prog_name="trainpace")
def _cli() -> None:
    """How long will this training take, what will it cost, why, and how do I make it faster?

    Exit codes: 0 ok; 1 the answer is no (does not fit, too late, too expensive); 2 the input is
    invalid.
    """


STDOUT_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""Errors of writing to a full disk or a lost terminal. They have no file name."""


def main(arguments: list[str] | None = None) -> None:
    open_closed_streams()
    never_fail_to_encode()
    gc.set_threshold(GARBAGE_EVERY)
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        sys.exit(code)
    except TrainpaceError as error:
        _stop(str(error), code=error.exit_code)
    except click.ClickException as error:
        _stop(error.format_message(), error)
    except click.exceptions.Abort:
        tell("Stopped.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        _discard_output()
        sys.exit(0)
    except OSError as error:
        if error.filename is not None:  # A file or folder that the system refuses.
            path = os.fsdecode(error.filename)
            _stop(f"cannot use {path}: {os_reason(error)}. Check the path and its permissions.")
        if error.errno not in STDOUT_FAILS:
            raise
        _discard_output()
        _stop(f"cannot write the answer: {os_reason(error)}.")


def _run(words: list[str]) -> int:
    if os.environ.get("_TRAINPACE_COMPLETE"):
        from trainpace.cli.program import complete

        complete(_cli)
    if not words:
        from trainpace.cli.program import greet

        greet()
        return 0
    code = _cli.main(words, prog_name="trainpace", standalone_mode=False, obj=words)
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Send the rest of the output to /dev/null, because writing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(message: str, error: click.ClickException | None = None, code: int = 2) -> None:
    context = getattr(error, "ctx", None)
    help_hint = f" See {context.command_path} --help." if context is not None else ""
    text = f"trainpace: {message}{help_hint}"
    if sys.stderr.isatty():
        from trainpace.report import wrapped

        width = shutil.get_terminal_size().columns
        text = "\n".join(wrapped(line, width) for line in text.split("\n"))
    tell(text, err=True)
    sys.exit(code)


LAUNCHERS = (
    "python",
    "python3",
    "torchrun",
    "accelerate",
    "deepspeed",
    "srun",
    "mpirun",
    "uv",
    "poetry",
    "pixi",
)
SETTINGS = (".json", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".slurm")

TRACES = (".json", ".gz", ".sqlite", ".nsys-rep", ".qdrep")


def meant(words: Sequence[str], verbs: Sequence[str]) -> list[str]:
    """Prepend the command that the arguments imply.

    Raises:
        TrainpaceError: No command fits. The message suggests the nearest names.
    """
    first, *rest = words
    program = os.path.basename(first)
    # Imported late: most command lines already name a command.
    from trainpace.workload import ModelSpec

    spec = ModelSpec.of(first)
    is_script = spec.kind == "script" or first.endswith(".ipynb")
    if is_script or program in LAUNCHERS or program.startswith("python3."):
        return ["look", *words]
    if spec.is_library or spec.runs_code or first in _built_in():
        return ["forecast", *words]
    if (first.endswith(TRACES) or os.path.isdir(first)) and _is_trace(first):
        return ["diagnose", *rest, first]
    if first.endswith(SETTINGS) and os.path.isfile(first):
        kind = _kind_of(first)
        return (
            as_config(["schedule", *words])
            if kind == "settings"
            else ["forecast", kind + first, *rest]
        )
    if os.path.isfile(os.path.join(first, "command.json")):
        return ["watch", "--from", *words]
    near = nearest_names(first, [*verbs, *_built_in()], limit=4)
    suggestion = f"Nearest: {', '.join(near)}. " if near else ""
    raise TrainpaceError(
        f"{first!r} is not a command, a script or a model.",
        f"{suggestion}Try trainpace train.py, trainpace resnet50, or trainpace --help.",
    )


def names_a_script(words: Sequence[str]) -> bool:
    """Return True if a training script follows the options. They then belong to `look`."""
    return any(word.endswith((".py", ".ipynb")) and os.path.isfile(word) for word in words)


def place_last(words: Sequence[str]) -> list[str]:
    """Move the options of `diagnose` in front of the trace or recording folder.

    Option parsing stops at the first argument, because it could be a command to run.
    """
    verb, *rest = words
    place, *options = rest or [""]
    begins = bool(options) and options[0].startswith("-") and options[0] != "--"
    is_place = begins and (os.path.isdir(place) or (place.endswith(TRACES) and _is_trace(place)))
    return [verb, *options, place] if is_place else [*words]


def as_config(words: Sequence[str]) -> list[str]:
    """Put `--config` before each settings file that is not the value of an option."""
    taken = ("--config", "--command")
    pairs = zip(words, ("", *words), strict=False)
    return [
        part
        for word, before in pairs
        for part in (
            ("--config", word)
            if word.endswith(SETTINGS) and not word.startswith("-") and before not in taken
            else (word,)
        )
    ]


def _kind_of(file: str) -> str:
    """Return the kind of a settings or model file.

    Returns:
        The model-spec prefix of a configuration file, "" for a saved workload, "settings" for other
            files.
    """
    if not file.endswith(".json"):
        return "settings"
    from trainpace.core.intake import read_json

    content = read_json(file)
    if not isinstance(content, dict):
        return "settings"
    if content.get("record") == "Workload":
        return ""
    if "_class_name" in content and "_diffusers_version" in content:
        return "diffusers:"
    return "transformers:" if "model_type" in content else "settings"


def _is_trace(place: str) -> bool:
    from trainpace.diagnose import is_trace

    return is_trace(place)


def _built_in() -> list[str]:
    from trainpace.workload import packaged_names

    return packaged_names()


VARIABLE = "_TRAINPACE_COMPLETE"


def complete(program: click.Group) -> None:
    """Print shell completions and exit. Prints nothing if the command line cannot be parsed."""
    try:
        program.main([], prog_name="trainpace", complete_var=VARIABLE)
    except TrainpaceError:
        sys.exit(0)


def verbs_and_scripts(verbs: Mapping[str, str], incomplete: str) -> list[CompletionItem]:
    """Complete the first word: commands with summaries, models, and scripts in this folder."""
    items = [
        CompletionItem(verb, help=text)
        for verb, text in verbs.items()
        if verb.startswith(incomplete)
    ]
    models = _built_in() if incomplete else []
    return [
        *items,
        *(CompletionItem(name) for name in models if name.startswith(incomplete)),
        _place("file", incomplete),
    ]


def values(name: str, metavar: str | None, incomplete: str) -> list[CompletionItem]:
    """Complete the value of an option or argument with known names or a path."""
    names = _NAMES[name]() if name in _NAMES else []
    items = [CompletionItem(n) for n in names if n.lower().startswith(incomplete.lower())]
    word = (metavar or "").partition(".")[0]
    if name == "model" or word in ("FILE", "PATH", "PATH|URL"):
        items.append(_place("file", incomplete))
    elif word == "FOLDER":
        items.append(_place("dir", incomplete))
    return items


def _gpus() -> list[str]:
    from trainpace.core.hardware import catalogue

    # A name with spaces would complete to two words. The hyphenated name is accepted too.
    return [device.name.replace(" ", "-") for device in catalogue() if device.kind == "gpu"]


def _precisions() -> Sequence[str]:
    from trainpace.core.execution import PRECISIONS

    return [*PRECISIONS]


def _optimizers() -> Sequence[str]:
    from trainpace.core.execution import OPTIMIZERS

    return [*OPTIMIZERS]


def _place(kind: str, incomplete: str) -> CompletionItem:
    return CompletionItem(incomplete, type=kind)


_NAMES = {"gpu": _gpus, "model": _built_in, "precision": _precisions, "optimizer": _optimizers}
"""Options with known names, by name."""
EXAMPLES = (
    (
        "trainpace train.py --epochs 30",
        "How long will my script take here, what slows it down, what would it cost elsewhere?",
    ),
    (
        "trainpace resnet50 --batch 64",
        "How fast is this model on GPUs that I do not have? Also: a transformers config.json.",
    ),
    ("trainpace doctor", "Does this machine work as it should, and can it be measured?"),
)


def greet() -> None:
    from trainpace.report import Headline, Lines, named, show

    question = (
        "How long will this training take, what will it cost, why, and how do I make it faster?"
    )
    show([Headline(question), named("", EXAMPLES), Lines(["All commands: trainpace --help"])])
