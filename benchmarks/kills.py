"""Every verb that runs longer than a second, ended at random moments by SIGKILL, SIGTERM and SIGINT: nothing kept before is lost,
nothing is half-written, no process stays, and the same command goes on to its end afterwards.

    python benchmarks/kills.py --kills 100        # of each verb
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RESULT = Path(__file__).parent / "results" / "kills.md"
MARK = "TRAINPACE_KILLS"
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "trainpace"
END_WITHIN_S = 10.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

TASK = """
import torch, time
class Data(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, i): time.sleep(0.001); return torch.full((16,), float(i)), i % 4
def task():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    return model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), Data()
class Samples:
    def __len__(self): return 400
    def __getitem__(self, i): time.sleep(0.005); return {"x": float(i)}
"""
TRAIN = """
import torch
from task import task
model, loss, optimizer, data = task()
for _ in range(6):
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()
"""
LADDER = """
task = "task.py:task"
seconds = 1
[start]
micro_batch = 4
accumulation = 2
threads = 1
[[rung]]
micro_batch = [8]
"""


class Verb(NamedTuple):
    """A command, what must hold of its folder whenever it was ended, and what must hold once it has run to its end."""

    words: tuple[str, ...]
    sound: Callable[[Path], str]
    done: Callable[[Path], str]


def journal_is_sound(folder: Path) -> str:
    place = folder / "data" / "trainpace" / "journal.db"
    if not place.exists():
        return ""
    with sqlite3.connect(place) as database:
        found = database.execute("pragma integrity_check").fetchone()[0]
    return "" if found == "ok" else f"the journal: {found}"


def kept_runs(folder: Path) -> set[str]:
    place = folder / "data" / "trainpace" / "journal.db"
    try:
        with sqlite3.connect(f"file:{place}?mode=ro", uri=True) as database:
            return {row[0] for row in database.execute("select id from runs")}
    except sqlite3.OperationalError:
        return set()


def whole_json(name: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        try:
            json.loads((folder / name).read_text()) if (folder / name).exists() else None
        except ValueError as error:
            return f"{name} is half-written: {error}"
        return ""

    return check


def shards_are_sound(folder: Path) -> str:
    for record in (folder / "shards").glob("shard-*.json"):
        problem = whole_json(str(record.relative_to(folder)))(folder)
        if problem or not record.with_suffix(".parquet").exists():
            return problem or f"{record.name} without its shard"
    return ""


def intact(folder: Path) -> str:
    done = trainpace(folder, "precompute", "--verify", "--out", "shards")
    return "" if done.returncode == 0 else done.stdout + done.stderr


def nothing(folder: Path) -> str:
    return ""


def leaving(file: str, *words: str) -> Verb:
    """A command that leaves this file of JSON, whole or not at all."""
    return Verb(words, whole_json(file), whole_json(file))


VERBS = {
    "measure": Verb(
        ("measure", "task.py:task", "--batch", "1,2,4", "--repeats", "1", "--seconds", "0.3s", "--no-forecast"),
        journal_is_sound, nothing,
    ),
    "precompute": Verb(
        ("precompute", "task.py:Samples", "--out", "shards", "--shard-samples", "25", "--workers", "2"),
        shards_are_sound, intact,
    ),
    "run": leaving("climb/ladder.json", "run", "ladder.toml", "--out", "climb"),
    "watch": Verb(("watch", "--", sys.executable, "train.py"), nothing, nothing),
    "diagnose": Verb(("diagnose", "--rounds", "2", "--block", "4", "--", sys.executable, "train.py"), nothing, nothing),
    "verify": Verb(("verify", "task.py:task", "--batch", "8", "--accumulate", "2"), nothing, nothing),
    "loader": leaving("loader.json", "loader", "task.py:Samples", "--output", "loader.json"),
    "forecast": leaving("w.json", "forecast", "task.py:task", "--gpu", "T4", "--save-workload", "w.json"),
    "calibrate": leaving("profile.json", "calibrate", "--output", "profile.json"),
    "journal import": Verb(("journal", "import", "many.csv"), journal_is_sound, journal_is_sound),
}  # fmt: skip


def environment(folder: Path, mark: str) -> dict[str, str]:
    home = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("DATA", "CONFIG", "CACHE")}
    return {**os.environ, **home, MARK: mark}


def command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "trainpace", *words]


def trainpace(folder: Path, *words: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(words), cwd=folder, env=environment(folder, mark), capture_output=True, text=True, check=False
    )


def prepare(folder: Path) -> None:
    texts = {"task.py": TASK, "train.py": TRAIN, "ladder.toml": LADDER}
    rows = [f"resnet18,T4,fp32,{n % 64 + 1},{20 + n / 1000}" for n in range(20_000)]
    texts["many.csv"] = "\n".join(["model_spec,gpu,precision,batch_per_gpu,step_time_ms", *rows]) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text)


def processes_of(mark: str) -> list[str]:
    """Living processes that inherited the mark, with their command lines."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                found.append(Path(f"/proc/{number}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


class Killed(NamedTuple):
    """`problem`: "" where all is well; None where the command had ended by itself before its signal."""

    problem: str | None
    signal: str
    gone_s: float


def kill_once(verb: Verb, folder: Path, longest_s: float, rng: random.Random, mark: str) -> Killed:
    """Start it, end it at a random moment, and look at what is left."""
    number = rng.choice(SIGNALS)
    before = kept_runs(folder)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command(verb.words),
            cwd=folder,
            env=environment(folder, mark),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        time.sleep(rng.uniform(0, longest_s))
        if process.poll() is not None:
            return Killed(None, number.name, 0.0)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        sent = time.monotonic()
        try:
            code = process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return Killed(f"still there {END_WITHIN_S:.0f} s after {number.name}", number.name, END_WITHIN_S)
        while (left := processes_of(mark)) and time.monotonic() - sent < END_WITHIN_S:
            time.sleep(0.05)
        gone_s = time.monotonic() - sent
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    problem = verb.sound(folder)
    if left:
        problem = f"still running after {END_WITHIN_S:.0f} s: {left[0][:200]}"
    elif not before <= kept_runs(folder):
        problem = "runs of the journal are lost"
    elif "Traceback" in text and f"{PACKAGE}/" in text:  # a script's own shows its own lines
        problem = f"a traceback: {text.strip().splitlines()[-1][:200]}"
    elif code not in (0, 1, 128 + number, -number):
        problem = f"exit code {code} after {number.name}: {text.strip()[-200:]}"
    return Killed(problem, number.name, gone_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each verb")
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    print("| verb | seconds | kills | slowest end, s | went on to its end | problems |\n|---|--:|--:|--:|---|---|")
    rows = []
    for name in asked.verbs:
        rng, verb = random.Random(f"{name} {asked.seed}"), VERBS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            prepare(folder)
            begun = time.monotonic()
            first = trainpace(folder, *verb.words)
            longest_s = time.monotonic() - begun
            assert first.returncode in (0, 1), first.stderr
        problems: Counter[str] = Counter()
        slowest_s, ended, hit = 0.0, "yes", 0
        while hit < asked.kills:
            with (
                tempfile.TemporaryDirectory() as place
            ):  # the same command, ended again and again until it comes to its end
                folder = Path(place)
                prepare(folder)
                while hit < asked.kills:
                    one = kill_once(verb, folder, longest_s, rng, f"{name}-{hit}-{os.getpid()}")
                    if one.problem is None:
                        break
                    hit += 1
                    slowest_s = max(slowest_s, one.gone_s)
                    problems[f"{one.signal}: {one.problem}"] += bool(one.problem)
                last = trainpace(folder, *verb.words)
                if last.returncode not in (0, 1) or verb.done(folder):
                    ended = f"no: {(verb.done(folder) or last.stderr)[-200:]}"
        found = "; ".join(f"{count} x {problem}" for problem, count in problems.items() if count) or "none"
        rows.append(f"| {name} | {longest_s:.1f} | {asked.kills} | {slowest_s:.1f} | {ended} | {found} |")
        print(rows[-1], flush=True)
    if len(asked.verbs) == len(VERBS):
        RESULT.write_text(_page(rows))
    return 1 if any("| none |" not in row or "| yes |" not in row for row in rows) else 0


def _page(rows: list[str]) -> str:
    today = datetime.date.today()
    return "\n".join([
        "# Ended at random moments (`make bench-kills`)", "",
        f"{today}, {platform.machine()}, {os.cpu_count()} cores. A third each of SIGKILL, SIGTERM and SIGINT, at moments spread"
        " evenly over what the verb takes, and counted where it still ran; afterwards the journal is whole and holds every run"
        " that it held before, no file is half-written, no process is left, and the same command runs to its end.",
        "", "| verb | seconds | kills | slowest end, s | went on to its end | problems |", "|---|--:|--:|--:|---|---|", *rows, "",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
