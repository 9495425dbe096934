"""Record real commands in a terminal: the README's picture, and a session of two minutes to be
played.

    python tools/session.py             all of it, into docs/pictures/
    python tools/session.py --keep      and the recordings in out/session, from which --again draws
    without running anything

Writes look.svg (the first command's answer), session.svg (which plays by itself) and session.cast
(asciinema's format v2, at the pace at which it happened). Commands run one after another in a new
folder, with a data folder of their own. Only the typing is not real: it is that of the commands
which then run.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from terminal_svg import Line, Screen, Shown, playing, still

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 88, 30
TYPING_S = 0.045
READING_S = 14.0
"""How long an answer stays before the next command is typed."""
MOST_RUNNING_S = 9.0
"""A command that takes longer runs faster in the picture; the cast keeps its pace."""
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "COLORTERM")
FRAME_S = 0.12
TIMEOUT_S = 600
MOST_BYTES = 300_000
JOB = ["--samples", "1281167", "--epochs", "90"]
COMMANDS: dict[str, list[str]] = {
    "How long does my script take, and what slows it down?": [
        "trainpace",
        "train.py",
        "--epochs",
        "20",
    ],
    "And a model on cards that I do not have?": [
        "trainpace",
        "forecast",
        "resnet50",
        "--gpu",
        "T4",
        "--gpu",
        "H100",
        "--batch",
        "64",
        "--precision",
        "amp_fp16",
    ],
    "Which server should I rent for the whole training?": [
        "trainpace",
        "match",
        "resnet50",
        *JOB,
        "--deadline",
        "24h",
    ],
    "What should I change?": [
        "trainpace",
        "plan",
        "resnet50",
        "--gpu",
        "A100",
        "--num-gpus",
        "4",
        "--batch",
        "64",
        *JOB,
    ],
}
"""The question, shown as a comment, and the command. The first is the README's."""


class Ran(NamedTuple):
    """What a command wrote to its terminal: (seconds since it began, text)."""

    question: str
    command: list[str]
    output: list[tuple[float, str]]


def record(question: str, command: list[str], folder: Path) -> Ran:
    """Run it in a pseudo-terminal. Raises RuntimeError where it fails."""
    import fcntl
    import termios

    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in UNSET} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "LANG": "C.UTF-8",
        "XDG_DATA_HOME": str(folder / ".data"),
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }
    begun, output = time.monotonic(), []
    process = subprocess.Popen(
        command,
        stdin=there,
        stdout=there,
        stderr=there,
        cwd=folder,
        env=env,
        start_new_session=True,
    )
    os.close(there)
    try:
        while True:
            try:
                read = os.read(here, 65536)
            except OSError:  # the last that had it open closed it
                break
            if not read:
                break
            output.append((time.monotonic() - begun, read))
    finally:
        os.close(here)
        code = process.wait(TIMEOUT_S)
    if code:
        said = b"".join(part for _, part in output).decode("utf-8", "replace")
        raise RuntimeError(f"{shlex.join(command)} ended with exit code {code}:\n{said}")
    return Ran(question, command, _merged(output, folder))


def _merged(output: Sequence[tuple[float, bytes]], folder: Path) -> list[tuple[float, str]]:
    """What came within a frame as one, without half characters, and without this machine's paths."""
    merged: list[tuple[float, bytes]] = []
    for at, part in output:
        if merged and at - merged[-1][0] < FRAME_S:
            merged[-1] = (merged[-1][0], merged[-1][1] + part)
        else:
            merged.append((at, part))
    texts, rest = [], b""
    for i, (at, part) in enumerate(merged):
        whole = rest + part
        cut = (
            len(whole) if i == len(merged) - 1 else max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        )
        whole, rest = whole[:cut], whole[cut:]
        text = whole.decode("utf-8", "replace")
        text = text.replace(f"{folder}/.data", "~/.local/share")
        for path in (f"{Path(sys.executable).parent}/", f"{folder}/", f"{ROOT}/"):
            text = text.replace(path, "")
        texts += [(at, text)] if text else []
    return texts


def shown_after(ran: Ran) -> list[Line]:
    """The command and its answer, as the terminal shows them in the end."""
    screen = Screen(COLUMNS)
    screen.feed(f"\x1b[1m$ {shlex.join(ran.command)}\x1b[0m\r\n")
    for _, text in ran.output:
        screen.feed(text)
    return screen.shown()


def events(
    session: Sequence[Ran], most_running_s: float = float("inf")
) -> tuple[list[tuple[float, str]], float]:
    """(seconds, text) of the whole session, and when it ends. A command that takes longer than
    `most_running_s` is sped up, which a line in its own words says.
    """
    listed: list[tuple[float, str]] = []
    now = 0.5
    for ran in session:
        listed.append((now, f"\x1b[2m# {ran.question}\x1b[0m\r\n$ "))
        now += 0.8
        for character in shlex.join(ran.command):
            listed.append((now, f"\x1b[1m{character}\x1b[0m"))
            now += TYPING_S
        took = ran.output[-1][0] if ran.output else 0.0
        fast = max(1.0, took / most_running_s)
        note = (
            f"  \x1b[2m({took:.0f} s, shown {fast:.0f} times as fast)\x1b[0m" if fast >= 1.5 else ""
        )
        listed.append((now, f"{note}\r\n"))
        listed += [(now + at / fast, text) for at, text in ran.output]
        now += took / fast + READING_S
        listed.append((now - 0.1, "\r\n"))
    return listed, now


def cast(session: Sequence[Ran]) -> str:
    listed, _ = events(session)
    head = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "Trainpace in two minutes"}
    lines = [head, *([round(at, 3), "o", text] for at, text in listed)]
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


def played(session: Sequence[Ran]) -> str:
    listed, end_s = events(session, MOST_RUNNING_S)
    screen = Screen(COLUMNS)
    frames: list[Shown] = []
    for i, (at, text) in enumerate(listed):
        screen.feed(text)
        following = listed[i + 1][0] if i + 1 < len(listed) else end_s
        if following - (frames[-1].at_s if frames else -1.0) >= FRAME_S:
            frames.append(Shown(at, screen.shown()))
    said = "; ".join(shlex.join(ran.command) for ran in session)
    return playing(frames, COLUMNS, ROWS, end_s, f"A recorded terminal session: {said}")


def main() -> None:
    """Record, and write the three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="keep the recordings in out/session")
    parser.add_argument("--again", action="store_true", help="draw those that were kept")
    options = parser.parse_args()
    kept = ROOT / "out" / "session" / "session.json"
    if options.again:
        session = [
            Ran(q, c, [(at, text) for at, text in output])
            for q, c, output in json.loads(kept.read_text())
        ]
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copy(ROOT / "examples" / "face_crops.py", folder / "train.py")
            subprocess.run(
                [sys.executable, "train.py", "--make", "out/faces"], cwd=folder, check=True
            )
            session = [record(question, command, folder) for question, command in COMMANDS.items()]
    if options.keep:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(session))
    first = session[0]
    files = {
        "look.svg": still(
            shown_after(first),
            COLUMNS,
            f"{shlex.join(first.command)} in a terminal, and its answer",
        ),
        "session.svg": played(session),
        "session.cast": cast(session),
    }
    for file, text in files.items():
        assert len(text.encode()) <= MOST_BYTES, f"{file} would have {len(text.encode()):,} bytes"
        (PICTURES / file).write_text(text, encoding="utf-8")
        print(f"{file}: {len(text.encode()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
