"""Run what the pages show, and compare what they show with what comes out.

    python tools/pages.py docs/tutorial.md            what differs
    python tools/pages.py --write docs/tutorial.md    put the real output in its place, as much of
    it as is shown

A page runs from top to bottom in an empty folder of its own that only has `examples/`, with a data
folder of its own:

- ```console: lines that begin with `$ ` run. Where output is shown below it, the real one must have
  the same words; numbers,
  units of time and bytes, drawn lines, the order of rows and line breaks may differ. A line `...`
  stands for any lines.
- ```python and ```toml: a block whose first line is `# NAME.py` or `# NAME.toml` becomes that file;
  other python runs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900
WIDTH = 100
ALIKE = 0.6
"""How like the old one a line has to be to take its place."""

_FENCE = re.compile(r"^```(console|python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\d[\d.,]*(?:e[-+]?\d+)?x?(?![\w])")
_ID = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b")  # of the journal's runs
_UNITS = (
    (re.compile(r"# ?(?:µs|us|ms|s|min|h|days?|weeks?|months?|years?)\b(?!/)"), "#time"),
    (re.compile(r"# ?(?:bytes|B|kB|KiB|MB|MiB|GB|GiB|TB)\b(?!/)"), "#bytes"),
    (re.compile(r"#time(?: #time)+"), "#time"),
)
_DRAWN = re.compile(r"[\u2500-\u25ff\u2800-\u28ff]+")


class Step(NamedTuple):
    """One thing to do:

    a command with what is shown below it, a script, or a file to write. `end` is where the output
    stops.
    """

    kind: str
    text: str
    shown: str = ""
    start: int = 0
    end: int = 0
    name: str = ""


class Difference(NamedTuple):
    """A step whose output is not what the page shows, or that failed."""

    step: Step
    real: str
    problem: str


def steps(page: str) -> list[Step]:
    """The steps that a page asks of its reader, in order."""
    listed: list[Step] = []
    for fence in _FENCE.finditer(page):
        kind, body, at = fence[1], fence[2], fence.start(2)
        name = _FILE_NAME.match(body)
        if name and kind != "console":
            listed.append(Step("file", body, name=name[1]))
        elif kind == "python":
            listed.append(Step("python", body))
        elif kind == "console":
            listed += _commands(body, at)
    return listed


def _commands(body: str, at: int) -> list[Step]:
    """Commands begin with `$ ` and go on after a backslash; what follows is their output."""
    pattern = r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n((?:(?!\$ )[^\n]*\n)*)"
    return [
        Step("command", match[1], match[2], at + match.start(2), at + match.end(2))
        for match in re.finditer(pattern, body, re.MULTILINE)
    ]


def loosely(text: str) -> str:
    """The words of an output, without what differs from run to run:

    numbers, their units, drawn lines, spaces.
    """
    text = _NUMBER.sub("#", _ID.sub("#", _DRAWN.sub(" ", text)))
    text = " ".join(text.split())
    for pattern, word in _UNITS:
        text = pattern.sub(word, text)
    return text


def agrees(shown: str, real: str) -> bool:
    """Does the real output say what is shown? The same words, since rows change their order and
    lines break elsewhere; with a line `...`, all lines that are shown and perhaps others.
    """
    lines = [loosely(line) for line in shown.splitlines() if line != "..."]
    if "..." not in shown.splitlines():
        return sorted(loosely(shown).split()) == sorted(loosely(real).split())
    whole = f" {loosely(real)} "
    return all(f" {line} " in whole for line in lines if line)


def run(step: Step, folder: Path) -> str:
    """Do it there; the standard output. Raises RuntimeError where it fails."""
    if step.kind == "file":
        (folder / step.name).write_text(step.text)
        return ""
    command = (
        [sys.executable, "-c", step.text] if step.kind == "python" else ["bash", "-c", step.text]
    )
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,  # so that a command that hangs is ended with all that it started
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": str(WIDTH),
            "XDG_DATA_HOME": str(folder / ".data"),
        },
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"it took more than {TIMEOUT_S} s") from None
    if process.returncode or "Traceback (most recent call last)" in errors:
        raise RuntimeError(f"exit code {process.returncode}\n{output}\n{errors}")
    return output


def _without_places(text: str, folder: Path) -> str:
    """The text as it would look in a folder of the reader's, with python on the path."""
    return text.replace(str(folder), "/home/you/training").replace(
        f"{Path(sys.executable).parent}/", ""
    )


def _tidy(text: str) -> str:
    """Strip spaces at the ends of lines, and empty lines at the ends of the text."""
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip("\n")) + "\n" if any(lines) else ""


def differences(page: str, folder: Path, to_digits: bool = False) -> list[Difference]:
    """Run a page in an empty folder. Ends at the first step that fails, since later ones may need
    it. `to_digits`: other numbers are a difference too.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    different: list[Difference] = []
    for step in steps(page):
        try:
            real = run(step, folder)
        except RuntimeError as error:
            return [*different, Difference(step, "", f"it failed: {error}")]
        real = _tidy(_without_places(real, folder))
        if step.kind == "command" and not real:
            different.append(Difference(step, real, "it printed nothing"))
        elif step.shown.strip() and (to_digits or not agrees(step.shown, real)):
            lines = difflib.unified_diff(
                step.shown.splitlines(), real.splitlines(), "shown", "real", lineterm="", n=1
            )
            different.append(Difference(step, real, "\n".join(lines)))
    return different


def _same_choice(shown: str, real: str) -> str:
    """The real output; where `...` stands in what is shown, only the lines that are most like those that are."""
    shown_lines = [loosely(line) for line in shown.splitlines() if line.strip() and line != "..."]
    lines = real.splitlines()
    if "..." not in shown.splitlines():
        return real
    chosen: set[int] = set()
    for line in shown_lines:
        near = {
            i: difflib.SequenceMatcher(None, line, loosely(other)).ratio()
            + (0.01 if i - 1 in chosen else 0.0)
            for i, other in enumerate(lines)
            if i not in chosen
        }
        best = max(near, key=lambda i: near[i], default=None)
        if best is not None and near[best] >= ALIKE:
            chosen.add(best)
    output: list[str] = []
    for i, line in enumerate(lines):
        if i in chosen or (not line and output[-1:] != ["..."]):
            output.append(line)
        elif line and output[-1:] != ["..."]:
            output = [*_without_last_empty(output), "..."]
    return "".join(f"{line}\n" for line in _without_last_empty(output))


def _without_last_empty(lines: list[str]) -> list[str]:
    return lines[:-1] if lines[-1:] == [""] else lines


def main() -> int:
    """Print differences; with --write put real output in the place of what is shown, and of a line `?`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    left = 0
    for path in options.pages:
        text = path.read_text()
        with tempfile.TemporaryDirectory() as folder:
            different = differences(text, Path(folder), to_digits=options.write)
        for difference in reversed(different):
            step = difference.step
            if options.write and difference.real:
                text = (
                    text[: step.start]
                    + _same_choice(step.shown, difference.real)
                    + text[step.end :]
                )
                continue
            left += 1
            print(f"{path}: $ {step.text}\n{difference.problem}\n")
        if options.write:
            path.write_text(text)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
