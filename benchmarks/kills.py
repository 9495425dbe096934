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
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

RESULT = Path(__file__).parent / "results" / "kills.md"
MARK = "TRAINPACE_KILLS"
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "trainpace"
END_WITHIN_S = 15.0
ENDING_ANYWAY_S = 3.0
"""A command that answers within this after a signal had been about to end."""
MOST_IN_A_ROUND = 25
LATE_SHARE = 0.1
"""Of the kills of a long verb, how many are spread over all of it rather than its first seconds."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EXIT_CODES = {number: (-number, 128 + number) for number in SIGNALS}
TEMPORARY = "temporary"

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
IMPORTED = 20_000
LADDER = """
task = "task.py:task"
seconds = 0.3
[start]
micro_batch = 4
accumulation = 2
threads = 1
[[rung]]
micro_batch = [8]
"""


class Verb(NamedTuple):
    """A command, what must hold of its folder whenever it was ended, and what must hold once it has run to its end. `early_s`: in
    which most kills come, of a verb that takes minutes."""

    words: tuple[str, ...]
    sound: Callable[[Path], str]
    done: Callable[[Path], str]
    early_s: float | None = None


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


def recordings_are_sound(folder: Path) -> str:
    notes = (folder / "data" / "trainpace" / "recordings").glob("*/command.json")
    return next(
        filter(None, (whole_json(str(note.relative_to(folder)))(folder) for note in notes)), ""
    )


def intact(folder: Path) -> str:
    done = trainpace(folder, "precompute", "--verify", "--out", "shards")
    return "" if done.returncode == 0 else done.stdout + done.stderr


def nothing(folder: Path) -> str:
    return ""


def there(name: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        return whole_json(name)(folder) if (folder / name).exists() else f"there is no {name}"

    return check


def holds_runs(count: int) -> Callable[[Path], str]:
    """Once or more: a sweep that had ended before its signal is measured again."""

    def check(folder: Path) -> str:
        found = len(kept_runs(folder))
        whole = found and found % count == 0
        return journal_is_sound(folder) or (
            "" if whole else f"{found} runs in the journal, not {count} or a multiple"
        )

    return check


def leaving(file: str, *words: str, early_s: float | None = None) -> Verb:
    """A command that leaves this file of JSON, whole or not at all."""
    return Verb(words, whole_json(file), there(file), early_s)


VERBS = {
    "run": leaving(
        "climb/ladder.json", "run", "ladder.toml", "--out", "climb", "--no-forecast", early_s=12.0
    ),
    "diagnose": Verb(
        ("diagnose", "--rounds", "2", "--block", "4", "--", sys.executable, "train.py"),
        nothing,
        nothing,
        early_s=8.0,
    ),
    "measure": Verb(
        (
            "measure",
            "task.py:task",
            "--batch",
            "1,2",
            "--repeats",
            "1",
            "--seconds",
            "0.2s",
            "--no-forecast",
        ),
        journal_is_sound,
        holds_runs(2),
    ),
    "verify": Verb(
        ("verify", "task.py:task", "--batch", "8", "--accumulate", "2"), nothing, nothing
    ),
    "loader": leaving(
        "loader.json",
        "loader",
        "task.py:Samples",
        "--output",
        "loader.json",
        "--workers",
        "0,2",
        "--seconds",
        "0.2s",
        "--repeats",
        "1",
    ),
    "watch": Verb(
        ("watch", "--", sys.executable, "train.py"), recordings_are_sound, recordings_are_sound
    ),
    "precompute": Verb(
        (
            "precompute",
            "task.py:Samples",
            "--out",
            "shards",
            "--shard-samples",
            "25",
            "--workers",
            "2",
        ),
        shards_are_sound,
        intact,
    ),
    "forecast": leaving(
        "w.json", "forecast", "task.py:task", "--gpu", "T4", "--save-workload", "w.json"
    ),
    "journal import": Verb(
        ("journal", "import", "many.csv"), journal_is_sound, holds_runs(IMPORTED)
    ),
    "calibrate": leaving(
        "profile.json", "calibrate", "--seconds", "2s", "--output", "profile.json", early_s=6.0
    ),
}


def environment(folder: Path, mark: str) -> dict[str, str]:
    home = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("DATA", "CONFIG", "CACHE")}
    return {**os.environ, **home, "TMPDIR": str(folder / TEMPORARY), MARK: mark}


def command(words: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "trainpace", *words]


def trainpace(folder: Path, *words: str, mark: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(words),
        cwd=folder,
        env=environment(folder, mark),
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder with the files that the commands need."""
    texts = {"task.py": TASK, "train.py": TRAIN, "ladder.toml": LADDER}
    rows = [f"resnet18,T4,fp32,{n % 64 + 1},{20 + n / 1000}" for n in range(IMPORTED)]
    texts["many.csv"] = (
        "\n".join(["model_spec,gpu,precision,batch_per_gpu,step_time_ms", *rows]) + "\n"
    )
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        folder = Path(place)
        (folder / TEMPORARY).mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        yield folder


def processes_of(mark: str) -> list[str]:
    """Living processes that inherited the mark, with their command lines."""
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{number}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(Path(f"/proc/{number}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


class Killed(NamedTuple):
    """`ended`: it had come to its end before the signal, or at the same moment, so that nothing was tried. `trouble`: kinds of
    TROUBLES, with a few words each."""

    signal: str
    ended: bool = False
    gone_s: float = 0.0
    trouble: tuple[tuple[str, str], ...] = ()


TROUBLES = ("lost or half-written", "left running", "files left", "wrong exit code", "traceback")


def kill_once(verb: Verb, folder: Path, longest_s: float, rng: random.Random, mark: str) -> Killed:
    """Start it, end it at a random moment, and look at what is left."""
    number = rng.choice(SIGNALS)
    early_s = longest_s if verb.early_s is None or rng.random() < LATE_SHARE else verb.early_s
    before = kept_runs(folder)
    shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
    (folder / TEMPORARY).mkdir()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command(verb.words),
            cwd=folder,
            env=environment(folder, mark),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        time.sleep(rng.uniform(0, early_s))
        if process.poll() is not None:
            return Killed(number.name, ended=True)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        sent = time.monotonic()
        try:
            code = process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            said.seek(0)
            words = f"{number.name}: still there {END_WITHIN_S:.0f} s later: {_last(said.read())}"
            return Killed(number.name, gone_s=END_WITHIN_S, trouble=(("left running", words),))
        while (left := processes_of(mark)) and time.monotonic() - sent < END_WITHIN_S:
            time.sleep(0.1)
        gone_s = time.monotonic() - sent
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    if code in (0, 1) and gone_s < ENDING_ANYWAY_S:
        return Killed(number.name, ended=True)
    return Killed(
        number.name,
        gone_s=gone_s,
        trouble=tuple(_troubles(verb, folder, number, code, before, left, text)),
    )


def _troubles(
    verb: Verb,
    folder: Path,
    number: signal.Signals,
    code: int,
    before: set[str],
    left: list[str],
    text: str,
) -> Iterator[tuple[str, str]]:
    unsound = verb.sound(folder) or (
        "" if before <= kept_runs(folder) else "runs of the journal are lost"
    )
    if unsound:
        yield TROUBLES[0], f"{number.name}: {unsound}"
    if left:
        yield TROUBLES[1], f"{number.name}: {left[0][:200]}"
    if number != signal.SIGKILL and (files := files_left(folder)):
        yield TROUBLES[2], f"{number.name}: {', '.join(files[:4])}"
    if code not in EXIT_CODES[number]:
        yield TROUBLES[3], f"{number.name}: {code}: {_last(text.encode())}"
    own = (
        "--" not in verb.words or "\nKeyboardInterrupt" not in text
    )  # an interrupted script shows its own traceback
    if own and "Traceback" in text and f"{PACKAGE}/" in text:
        where = [line.strip() for line in text.splitlines() if f"{PACKAGE}/" in line][-1]
        yield (
            TROUBLES[4],
            f"{number.name}: {_last(text.encode())}, at {where.partition(str(PACKAGE))[2]}",
        )


def _last(text: bytes) -> str:
    return (text.decode("utf-8", "replace").strip().splitlines() or ["nothing said"])[-1][:200]


def files_left(folder: Path) -> list[str]:
    """What only a process that is still at work may have: in the temporary folder, and half-written beside its final name.
    torch keeps a cache of compiled code in the temporary folder."""
    temporary = [
        path.name
        for path in (folder / TEMPORARY).iterdir()
        if not path.name.startswith("torchinductor")
    ]
    asides = [path.name for path in folder.glob(".*") if path.name != ".lock"]
    return temporary + asides


class Tally:
    """What the kills of one verb came to so far."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.verb, self._rng = name, VERBS[name], random.Random(f"{name} {seed}")
        self.longest_s, self._slowest_s = 0.0, 0.0
        self._signals, self._troubles, self.said = Counter[str](), Counter[str](), list[str]()
        self._rounds = self._to_the_end = 0

    @property
    def kills(self) -> int:
        return self._signals.total()

    def time_it(self) -> None:
        """How long it takes where nothing ends it."""
        with new_folder() as folder:
            begun = time.monotonic()
            first = trainpace(folder, *self.verb.words)
            self.longest_s = time.monotonic() - begun
            wrong = (
                _last(first.stderr.encode())
                if first.returncode not in (0, 1)
                else self.verb.done(folder)
            )
            self.said += [f"{self.name}: before: {wrong}"] if wrong else []

    def end_again_and_again(self, most: int) -> None:
        """The same command in one folder, ended until it comes to its end, or `most` times and then let run to it."""
        if not self.longest_s:
            self.time_it()
        with new_folder() as folder:
            for _ in range(most):
                one = kill_once(
                    self.verb,
                    folder,
                    self.longest_s,
                    self._rng,
                    f"{self.name}-{self.kills}-{os.getpid()}",
                )
                if one.ended:
                    break
                self._signals[one.signal] += 1
                self._slowest_s = max(self._slowest_s, one.gone_s)
                self._troubles.update(kind for kind, _ in one.trouble)
                self.said += [f"{self.name}: {kind}: {words}" for kind, words in one.trouble]
                print(f"{self.name} {self.kills}: {one}", file=sys.stderr, flush=True)
            last = trainpace(folder, *self.verb.words)
            wrong = f"exit code {last.returncode}: {_last(last.stderr.encode())}"
            wrong = self.verb.done(folder) if last.returncode in (0, 1) else wrong
        self._rounds += 1
        self._to_the_end += not wrong
        self.said += [f"{self.name}: afterwards: {wrong}"] if wrong else []

    @property
    def row(self) -> str:
        each = " + ".join(str(self._signals[number.name]) for number in SIGNALS)
        found = " | ".join(str(self._troubles[kind]) for kind in TROUBLES)
        first = "" if self.verb.early_s is None else f" (first {self.verb.early_s:.0f})"
        ends = f"{self._to_the_end} of {self._rounds} | {self._slowest_s:.1f}"
        return f"| {self.name} | {self.longest_s:.0f}{first} | {self.kills} | {each} | {found} | {ends} |"


def work_through(tallies: list[Tally], kills: int, until: float, at_once: int) -> None:
    """Rounds of the verb that has the fewest kills, until all have enough or the time is up."""
    waiting, changing = list(tallies), threading.Condition()

    def work() -> None:
        while time.monotonic() < until:
            with changing:
                if not (open_ := [tally for tally in waiting if tally.kills < kills]):
                    return
                tally = min(open_, key=lambda tally: tally.kills)
                waiting.remove(tally)
            try:
                tally.end_again_and_again(min(MOST_IN_A_ROUND, kills - tally.kills))
            finally:
                waiting.append(tally)

    with ThreadPoolExecutor(at_once) as pool:
        for job in [pool.submit(work) for _ in range(at_once)]:
            job.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each verb")
    parser.add_argument("--verbs", nargs="*", default=list(VERBS), choices=list(VERBS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="verbs at a time")
    parser.add_argument("--minutes", type=float, default=600, help="begin nothing after that")
    asked = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, and what they start, ignore it
    begun, tallies = time.monotonic(), [Tally(name, asked.seed) for name in asked.verbs]
    work_through(tallies, asked.kills, begun + 60 * asked.minutes, asked.at_once)
    rows, said = (
        [tally.row for tally in tallies],
        [words for tally in tallies for words in tally.said],
    )
    page = _page(rows, said, (time.monotonic() - begun) / 60)
    print(page)
    if len(asked.verbs) == len(VERBS):
        RESULT.write_text(page)
    return 1 if said else 0


HEAD = (
    f"| verb | seconds | kills | {' + '.join(number.name for number in SIGNALS)} | {' | '.join(TROUBLES)}"
    " | went on to its end | slowest end, s |",
    "|---|--:|--:|--:|" + "--:|" * (len(TROUBLES) + 2),
)


def _page(rows: list[str], trouble: list[str], minutes: float) -> str:
    today, shown = datetime.date.today(), Counter(trouble).items()
    return "\n".join(
        [
            "# Ended at random moments (`python -m benchmarks kills`)",
            "",
            f"{today}, {platform.machine()}, {os.cpu_count()} cores, two verbs at a time, {minutes:.0f} minutes. Signals came at"
            " moments spread evenly over what the verb takes (for one with `first`, nine of ten in its first seconds), and are"
            f" counted where it still ran and did not end by itself within {ENDING_ANYWAY_S:.0f} s. Afterwards: the journal is whole"
            " and holds every run that it held before, no file is half-written, no process is left, no temporary file (after SIGTERM"
            " and SIGINT; nobody can remove those of a process that was killed), the exit code is the signal's. The command was"
            " ended again and again in the same folder until it came to its end, or was then let run to it.",
            "",
            *HEAD,
            *rows,
            "",
            *(f"- {count} x {words}" for words, count in shown),
            *([""] if trouble else []),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
