"""Command group of the program, and handling of its errors."""

import errno
import gc
import importlib
import os
import sys
from typing import Any

import click

from trainpace.core.errors import TrainpaceError, os_reason
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
            from trainpace.cli.words import names_a_script

            own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
            if args[0].partition("=")[0] not in own and names_a_script(args):
                args = ["look", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from trainpace.cli.words import meant

            args = meant(args, tuple(VERBS))
        elif args[:1] == ["diagnose"]:
            from trainpace.cli.words import place_last

            args = place_last(args)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from trainpace.cli.words import verbs_and_scripts

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
        from trainpace.cli.words import complete

        complete(_cli)
    if not words:
        from trainpace.cli.words import greet

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
    tell(f"trainpace: {message}{help_hint}", err=True)
    sys.exit(code)
