"""The command line: parse, call, render; nothing else. Verbs are imported when they are called."""

import sys

from trainpace.cli.endings import kept


def main(arguments: list[str] | None = None) -> None:
    """Run a command and end the program with its exit code; an interrupt at any moment ends it quietly with 130."""
    try:
        with kept():
            from trainpace.cli.program import main as run

            run(arguments)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


__all__ = ["main"]
