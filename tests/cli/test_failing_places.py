"""Commands report full, read-only or removed output folders in one line."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from entries import entry
from nouns import workload
from trainpace.core.errors import UnreadableInput
from trainpace.core.host import user_folder
from trainpace.core.records import save
from trainpace.journal import Journal, database
from trainpace.report.watch import from_home

TASK = """
import pathlib, shutil, sys, torch
def task():
    for folder in pathlib.Path(__file__).with_name("remove").read_text().split():
        shutil.rmtree(folder)
    model = torch.nn.Linear(16, 4)
    data = [(torch.full((16,), float(i)), i % 4) for i in range(64)]
    return model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), data
class Samples:
    def __len__(self): return 40
    def __getitem__(self, i):
        for folder in pathlib.Path(__file__).with_name("remove").read_text().split():
            shutil.rmtree(folder, ignore_errors=True)
        return {"x": float(i)}
"""
TRAIN = """
import pathlib, shutil, sys, torch
for folder in sys.argv[1:]:
    shutil.rmtree(folder)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.utils.data.DataLoader([torch.ones(16)] * 64, batch_size=4):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
print("trained")
"""
LADDER = 'task = "task.py:task"\nseconds = 0.2\n[start]\nmicro_batch = 4\naccumulation = 2\n[[rung]]\nmicro_batch = [8]\n'
ARGS = "model_name_or_path: mine\nper_device_train_batch_size: 8\nbf16: false\nfp16: false\n"
MEASURE = (
    "measure",
    "task.py:task",
    "--batch",
    "1",
    "--repeats",
    "1",
    "--seconds",
    "0.1s",
    "--no-forecast",
)
WATCH = ("watch", "--output", "PLACE/recorded", "--", sys.executable, "train.py")
COMMANDS = {
    "measure": (*MEASURE, "--journal", "PLACE/journal.db"),
    "watch": WATCH,
    "run": ("run", "ladder.toml", "--no-forecast", "--no-journal", "--out", "PLACE/climb"),
    "forecast": ("forecast", "resnet18", "--gpu", "T4", "--save-workload", "PLACE/w.json"),
    "precompute": ("precompute", "task.py:Samples", "--workers", "1", "--out", "PLACE/shards"),
    "journal import": ("journal", "import", "runs.csv", "--journal", "PLACE/journal.db"),
    "journal export": ("journal", "export", "PLACE/out.csv", "--journal", "own.db"),
    "plan --write": (
        "plan",
        "model.json",
        "--gpu",
        "A100",
        "--samples",
        "100k",
        "--epochs",
        "3",
        "--config",
        "PLACE/args.yaml",
        "--write",
        "--yes",
    ),
}


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "task.py": TASK,
        "train.py": TRAIN,
        "ladder.toml": LADDER,
        "remove": "",
    }.items():
        (tmp_path / name).write_text(text)
    rows = [f"resnet18,T4,fp32,{n},{20 + n}" for n in range(1, 400)]
    (tmp_path / "runs.csv").write_text(
        "\n".join(["model_spec,gpu,precision,batch_per_gpu,step_time_ms", *rows]) + "\n"
    )
    save(workload(), tmp_path / "model.json")
    Journal.open(str(tmp_path / "own.db")).close()
    (tmp_path / "PLACE").mkdir()
    return tmp_path


@pytest.fixture
def place(folder):
    """Mount a file system of 1 MiB."""
    place = folder / "PLACE"
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a small file system")
    (place / "args.yaml").write_text(ARGS)
    yield place
    subprocess.run(["umount", place], check=True)


def trainpace(folder, *words):
    command = [sys.executable, "-m", "trainpace", *words]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def fill(place):
    with open(place / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def said(done):
    """Return the error message, which is the last line."""
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("trainpace: ")
    return last


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_full_disk_is_reported_and_existing_files_stay(folder, place, verb):
    fill(place)
    done = trainpace(folder, *COMMANDS[verb])
    assert done.returncode == 2
    assert any(
        words in said(done) for words in ("no space left on device", "disk is full", "has room for")
    )
    assert "PLACE" in said(done)
    assert {path.name for path in place.rglob("*") if path.is_file() and path.stat().st_size} <= {
        "ballast",
        "args.yaml",
    }
    assert (place / "args.yaml").read_text() == ARGS


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMMANDS)
def test_read_only_folder_is_reported(folder, place, verb):
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    done = trainpace(folder, *COMMANDS[verb])
    assert done.returncode == 2
    assert "read-only file system" in said(done) or "unable to open database file" in said(done)
    assert "PLACE" in said(done)


@pytest.mark.slow
def test_read_only_journal_is_reported_before_measuring(folder, place):
    with Journal.open(str(place / "journal.db")):
        pass
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    begun = time.monotonic()
    done = trainpace(folder, *MEASURE, "--seconds", "60s", "--journal", "PLACE/journal.db")
    assert done.returncode == 2
    assert "PLACE/journal.db cannot be used" in said(done)
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_script_continues_if_the_recorder_disk_fills_up(folder, place):
    (folder / "train.py").write_text(
        f"ballast = open({str(place / 'ballast')!r}, 'wb', buffering=0)\ntry:\n    while True: ballast.write(bytes(4096))\n"
        f"except OSError: pass\n{TRAIN}"
    )
    done = trainpace(folder, *WATCH)
    assert "trained\n" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "no space left on device" in done.stderr.lower()


# --- folders removed during a command


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["measure", "run", "precompute"])
def test_output_folder_removed_during_a_command_is_reported(folder, verb):
    place = {"measure": "PLACE", "run": "PLACE/climb", "precompute": "PLACE/shards"}[verb]
    (folder / "remove").write_text(str(folder / place))
    if verb == "measure":  # so that the journal exists for the first probe
        (folder / "task.py").write_text(
            TASK.replace("shutil.rmtree(folder)", "shutil.rmtree(folder, ignore_errors=True)")
        )
    done = trainpace(folder, *COMMANDS[verb])
    assert done.returncode == 2
    assert place.rpartition("/")[2] in said(done)


@pytest.mark.slow
def test_recording_removed_by_the_script_is_not_an_error(folder):
    done = trainpace(folder, *WATCH, str(folder / "PLACE" / "recorded"))
    assert "trained\n" in done.stdout
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


# --- changes of the wall clock


def test_durations_ignore_changes_of_the_wall_clock(tmp_path, monkeypatch):
    """The wall clock is set back by an hour while a command is recorded."""
    import json

    from trainpace.watch import command

    later = iter([1e9, *[1e9 - 3600.0] * 1000])
    monkeypatch.setattr(command.time, "time", lambda: next(later))
    assert (
        command.watch([sys.executable, "-c", "import time; time.sleep(0.2)"], tmp_path / "recorded")
        == 0
    )
    note = json.loads((tmp_path / "recorded" / "command.json").read_text())
    assert 0.2 <= note["seconds"] < 60
    assert note["started"] == 1e9


def test_wall_clock_is_read_only_in_listed_modules():
    """These modules record when something happened, or compare with file times."""
    package = Path(__file__).parents[2] / "src" / "trainpace"
    moments = {"watch/command.py", "run/script.py"} | {
        f"watch/inside/{name}.py" for name in ("start", "files", "observers")
    }
    words = ("time.time()", "time.time_ns()", "datetime.now() -", "utcnow")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert found == moments


UNREADABLE = (
    "forecast no/x.json --gpu T4",
    "plan no/x.json --gpu T4 --samples 1000 --epochs 1",
    "plan resnet18 --watched no/rec --gpu T4",
    "match no/x.json --samples 1000 --epochs 1",
    "schedule --config no/x.json",
    "watch --from no/x",
    "diagnose no",
    "diagnose no/x",
    "precompute no/x.py:D --out o",
    "verify no/x.py:f",
    "journal import no/x.json --journal own.db",
    "journal export no/x.csv --journal own.db",
    "journal list --journal no/j.db",
    "journal merge no/j.db --journal own.db",
)


@pytest.fixture
def unreadable(folder, monkeypatch):
    """A folder that nobody may enter, for a process without the rights of root."""
    (folder / "no").mkdir()
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    if not os.getuid() and subprocess.run([*drop, "true"], capture_output=True).returncode:
        pytest.skip("needs setpriv to give up the rights of root")
    monkeypatch.setattr(
        subprocess, "run", partial(with_prefix, subprocess.run, [] if os.getuid() else drop)
    )
    (folder / "no").chmod(0)
    yield folder
    (folder / "no").chmod(0o700)


def with_prefix(run, prefix, command, **options):
    return run([*prefix, *command], **options)


@pytest.mark.slow
@pytest.mark.parametrize("words", UNREADABLE)
def test_folder_that_may_not_be_entered_is_one_sentence(words, unreadable):
    done = trainpace(unreadable, *words.split())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search("permission denied|no folder|does not exist", done.stderr, re.IGNORECASE)


def test_user_without_home_and_account_keeps_files_in_the_temporary_folder(monkeypatch, tmp_path):
    def unknown(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert user_folder("data").is_relative_to(tmp_path)
    assert from_home(tmp_path / "rec") == str(tmp_path / "rec")


def test_home_folder_is_read_in_one_module():
    """Both calls raise RuntimeError for a user without HOME and without an account."""
    package = Path(__file__).parents[2] / "src" / "trainpace"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("Path.home()", ".expanduser()"))
    }
    assert found == {"core/host.py"}


PLACES = """
import pathlib, sys
from trainpace.core.errors import TrainpaceError
from test_relations import COMMANDS
asked = 0
for fields in COMMANDS.values():
    for field in fields.values():
        if field.is_flag or field.choices or field.kind is not str:
            continue
        try:
            field.read("no/x.json")
        except TrainpaceError:
            asked += 1
print(asked)
"""


@pytest.mark.slow
def test_every_option_for_a_file_reads_a_place_that_may_not_be_entered(unreadable):
    """No option ends in another error than TrainpaceError. Some check their file at once."""
    tests = Path(__file__).parents[1]
    script = f"import sys; sys.path[:0] = {[str(tests), str(tests / 'verbs')]!r}\n{PLACES}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=unreadable, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_locked_journal_is_said_within_seconds(folder, monkeypatch):
    monkeypatch.setattr(database, "LOCK_WAIT_S", 0.5)
    with contextlib.closing(sqlite3.connect(folder / "own.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with (
            Journal.open(str(folder / "own.db")) as journal,
            pytest.raises(UnreadableInput) as told,
        ):
            journal.add(entry())
        assert time.monotonic() - began < 5
    assert "is locked by another process. Nothing was saved" in str(told.value)
