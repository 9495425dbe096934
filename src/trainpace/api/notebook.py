"""Notebook support: records are shown as tables, and `%trainpace` runs the command line in a cell.

%load_ext trainpace
%trainpace forecast resnet50 --gpu T4 --batch {batch}
answer = %trainpace forecast resnet50 --gpu T4 --json
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from typing import IO, Any, Generic, TypeVar

from trainpace.core.child import Child
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record
from trainpace.report import html_of

T = TypeVar("T")
WIDTH = "100"
"""Approximate number of columns of a notebook cell."""
OUR_SENTENCE = "trainpace: "


class Listed(list[T], Generic[T]):
    """List that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html_of(self)


def show_records() -> None:
    """Make notebooks show every record with `html_of`. The class itself does not know notebooks."""
    setattr(Record, "_repr_html_", html_of)  # noqa: B010


def shown(answer: T) -> T:
    """Make notebooks show answers of this type with `html_of`. For answers that are not records."""
    setattr(type(answer), "_repr_html_", html_of)  # noqa: B010
    return answer


def magic(line: str) -> Any:
    """Run the command line in a separate process and show its output as it comes.

    With --json, the answer is returned as plain Python values. Exit code 1 is a normal answer, a
    "no". Exit code 2 ends the cell with one sentence.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise _usage_error(f"{error}: {line}") from None
    command = [sys.executable, "-P", "-m", "trainpace", *words]
    environment = {"COLUMNS": WIDTH, **os.environ, "PYTHONIOENCODING": "utf-8"}
    refused: list[str] = []
    as_values = "--json" in words
    with Child(
        command,
        environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as running:
        beside = threading.Thread(target=_pass_on, args=(running.stderr, refused))
        beside.start()
        try:
            if as_values:
                text = running.stdout.read()
            else:
                for out in running.stdout:
                    print(out, end="", flush=True)
            code = running.wait()
        except KeyboardInterrupt:  # Only the kernel was interrupted.
            running.cut_lifeline()
            raise
        finally:
            beside.join()
    if code not in (0, 1):
        raise _usage_error("".join(refused) or f"trainpace ended with exit code {code}.")
    for sentence in refused:
        print(sentence, end="", file=sys.stderr)
    return json.loads(text) if as_values and text.strip() else None


def _pass_on(errors: IO[str], refused: list[str]) -> None:
    """Print notes in the cell, and store the reason of a failure for the end."""
    for line in errors:
        if line.startswith(OUR_SENTENCE):
            refused.append(line)
        else:
            print(line, end="", file=sys.stderr, flush=True)


def _usage_error(sentence: str) -> Exception:
    """Return an error that IPython shows without a traceback."""
    try:
        from IPython.core.error import UsageError
    except ImportError:
        return TrainpaceError(sentence)
    return UsageError(sentence.strip())


def load_ipython_extension(shell: Any) -> None:
    """Register the magic. IPython calls this function for `%load_ext trainpace`."""
    shell.register_magic_function(magic, "line", "trainpace")
