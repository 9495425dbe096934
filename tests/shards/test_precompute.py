"""`trainpace precompute` with its worker processes: computes once, resumes, rejects, verifies and repairs."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shard_folders import NUMBERS
from trainpace.core import worker as workers
from trainpace.shards import Settings, ShardDataset, precompute
from trainpace.shards.precompute_worker import SampleCosts, decide

FLAGS = "--workers 2 --shard-samples 10".split()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "numbers_file.py").write_text(NUMBERS)
    return tmp_path / "numbers_file.py"


def run(*arguments, **options):
    command = [sys.executable, "-m", "trainpace", "precompute", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def read(folder):
    data = ShardDataset(folder)
    return [int(data[i][1]) for i in range(len(data))]


def test_rerun_recomputes_only_damaged_shards(file, tmp_path):
    out = tmp_path / "out"
    done = run(f"{file}:Numbers", "--out", out, *FLAGS)
    assert done.returncode == 0, done.stderr
    assert "as 9 of 9 shards" in done.stdout
    assert read(out) == list(range(90))
    assert (ShardDataset(out)[77][0] == np.full((3, 5), 77)).all()
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("*.parquet")}

    assert "nothing left to compute" in run(f"{file}:Numbers", "--out", out, *FLAGS).stdout
    assert run("--verify", "--out", out).stdout == "Yes: all 9 shards are intact.\n"

    with open(out / "shard-000002.parquet", "r+b") as shard:
        shard.seek(300)
        byte = shard.read(1)
        shard.seek(300)
        shard.write(bytes([byte[0] ^ 4]))
    with open(out / "shard-000005.parquet", "r+b") as shard:
        shard.truncate(200)
    (out / "shard-000008.parquet").unlink()
    (out / "shard-000001.json").write_text("{")
    found = run("--verify", "--out", out)
    assert found.returncode == 1
    assert [
        line.split(":")[:2] for line in found.stdout.splitlines() if line.startswith("shard-")
    ] == [
        ["shard-000001.parquet", " its record cannot be read"],
        ["shard-000002.parquet", " changed"],
        ["shard-000005.parquet", " cut or extended"],
        ["shard-000008.parquet", " missing"],
    ]
    mended = run("--repair", "--out", out, *FLAGS)
    assert mended.returncode == 0, mended.stderr
    assert "Computed 40 samples" in mended.stdout
    assert run("--verify", "--out", out, "--json").returncode == 0
    assert read(out) == list(range(90))
    after = {p.name: p.stat().st_mtime_ns for p in out.glob("*.parquet")}
    assert {n for n in after if after[n] != before[n]} == {
        f"shard-00000{i}.parquet" for i in (1, 2, 5, 8)
    }


def test_precompute_runs_torch_dataset_from_its_folder(tmp_path):
    (tmp_path / "squares.py").write_text(
        "import torch\nsquares = [(torch.tensor(i * i), i) for i in range(20)]\n"
    )
    done = run("squares.py:squares", "--out", "out", *FLAGS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read(tmp_path / "out")) == 20


def test_bad_samples_are_skipped_up_to_max_bad(file, tmp_path):
    out = tmp_path / "out"
    done = run(f"{file}:broken_at_7_and_50", "--out", out, *FLAGS, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bad"] == 2
    lines = [json.loads(line) for line in (out / "bad_samples.jsonl").read_text().splitlines()]
    assert lines == [{"index": i, "reason": "OSError: cannot identify image file"} for i in (7, 50)]
    assert read(out) == [i for i in range(90) if i not in (7, 50)]
    refused = run(
        f"{file}:broken_at_7_and_50", "--out", tmp_path / "other", *FLAGS, "--max-bad", "0.01"
    )
    assert refused.returncode == 2
    assert "more than --max-bad 1 % of 90" in refused.stderr
    assert "cannot identify image file" in refused.stderr


def test_last_part_writes_the_manifest(file, tmp_path):
    out = tmp_path / "out"
    first = run(f"{file}:Numbers", "--out", out, *FLAGS, "--part", "2/2")
    assert "4 of 9 shards are written" in first.stdout, first.stderr
    assert not (out / "manifest.json").exists()
    second = run(f"{file}:Numbers", "--out", out, *FLAGS, "--part", "1/2")
    assert "as 5 of 9 shards" in second.stdout
    assert read(out) == list(range(90))


def test_changed_code_or_settings_are_rejected(file, tmp_path):
    out = tmp_path / "out"
    assert run(f"{file}:Numbers", "--out", out, *FLAGS).returncode == 0
    file.write_text(NUMBERS.replace("index, dtype", "index + 1, dtype"))
    refused = run(f"{file}:Numbers", "--out", out, *FLAGS)
    assert refused.returncode == 2
    assert "numbers_file.py has changed" in refused.stderr
    (out / "shard-000003.parquet").unlink()
    assert "numbers_file.py has changed" in run("--repair", "--out", out).stderr
    assert (out / "manifest.json").exists()  # A shard that cannot be repaired stays unchanged.
    assert "Traceback" not in refused.stderr
    assert run(f"{file}:Numbers", "--out", out, *FLAGS, "--again").returncode == 0
    assert ShardDataset(out)[3][0][0, 0] == 4
    assert (
        "--shard-samples was 10"
        in run(f"{file}:Numbers", "--out", out, "--shard-samples", "30").stderr
    )


def test_dataset_that_differs_between_processes_is_rejected(file, tmp_path):
    shuffled = "import random\n\ndef shuffled():\n    data = Numbers()\n    data.order = random.sample(range(90), 90)\n    return data\n"
    file.write_text(NUMBERS + shuffled)
    done = run(f"{file}:shuffled", "--out", tmp_path / "out", *FLAGS)
    assert done.returncode == 2
    assert "put together differently in every process" in done.stderr


def test_dataset_of_a_task_is_precomputed(file, tmp_path):
    file.write_text(
        NUMBERS
        + "\nimport torch\n\ndef task():\n    return torch.nn.Linear(1, 1), None, None, Numbers(20)\n"
    )
    assert run(f"{file}:task", "--out", tmp_path / "out", *FLAGS).returncode == 0
    assert read(tmp_path / "out") == list(range(20))


BAD_INPUT = {
    "import random\nclass D:\n    def __len__(self): return 3\n    def __getitem__(self, i): return random.random()\n": "generator of Python",
    "class D:\n    def __iter__(self): return iter([1])\n": "no dataset with __len__",
    "D = []\n": "a dataset of no samples",
    "class D:\n    def __len__(self): return 3\n    def __getitem__(self, i): raise KeyError('path')\n": "KeyError: 'path'",
    "class D:\n    def __len__(self): return 3\n    def __getitem__(self, i): return object()\n": "a object, which no column",
    "raise SystemExit(3)\n": "SystemExit",
    "import os\nclass D:\n    def __len__(self): return 3\n    def __getitem__(self, i): os.abort()\n": "SIGABRT",
    "E = 3\n": "unknown name",
    "syntax error here\n": "SyntaxError",
}


@pytest.mark.parametrize("text", BAD_INPUT, ids=list(BAD_INPUT.values()))
def test_invalid_dataset_file_gives_one_line_error(text, tmp_path):
    (tmp_path / "bad_file.py").write_text(text)
    done = run(f"{tmp_path}/bad_file.py:D", "--out", tmp_path / "out", "--workers", "1")
    assert done.returncode == 2
    assert BAD_INPUT[text] in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.py:D", "--out", "x"], "no such file"),
        (["none", "--out", "x"], "is not FILE.py:NAME"),
        (["--out", "x"], "TARGET"),
        (["--verify", "--out", "x"], "holds no precomputed samples"),
        (["a.py:D", "--out", "x", "--part", "3/2"], "valid part"),
        (["a.py:D", "--out", "."], "holds other files"),
        (["a.py:D", "--out", "locked"], "cannot use locked: is a directory"),
        (
            ["a.py:D", "--out", "/proc/x", "--estimate"],
            "trainpace: cannot write into /proc: no such file or directory",
        ),
    ],
)
def test_invalid_arguments_are_rejected(arguments, words, tmp_path):
    (tmp_path / "something").touch()
    (tmp_path / "a.py").write_text("D = [1]")
    (tmp_path / "locked" / ".lock").mkdir(parents=True)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_concurrent_precompute_is_rejected(file, tmp_path):
    out = tmp_path / "out"
    file.write_text(
        NUMBERS.replace("return np.full", "import time; time.sleep(0.05); return np.full")
    )
    first = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainpace",
            "precompute",
            f"{file}:Numbers",
            "--out",
            str(out),
            *FLAGS,
        ]
    )
    while not (out / "plan.json").exists():
        assert first.poll() is None
        time.sleep(0.02)
    second = run(f"{file}:Numbers", "--out", out, *FLAGS)
    assert second.returncode == 2
    assert "another precompute is at work" in second.stderr
    part = run(f"{file}:Numbers", "--out", out, *FLAGS, "--part", "1/2")
    assert "another precompute is at work" in part.stderr
    assert first.wait() == 0


def test_interrupted_precompute_resumes(file, tmp_path):
    out = tmp_path / "out"
    file.write_text(
        NUMBERS.replace("return np.full", "import time; time.sleep(0.05); return np.full")
    )
    begun = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainpace",
            "precompute",
            f"{file}:Numbers",
            "--out",
            str(out),
            *FLAGS,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (out / "shard-000000.json").exists():
        assert begun.poll() is None
        time.sleep(0.02)
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate()
    assert begun.returncode == 130
    assert "note: finished shards are kept; the same command goes on from there" in said
    assert run(f"{file}:Numbers", "--out", out, *FLAGS).returncode == 0
    assert read(out) == list(range(90))


@pytest.mark.slow
def test_precompute_survives_kills_at_random_times(file, tmp_path):
    out = tmp_path / "out"
    file.write_text(
        NUMBERS.replace("return np.full", "import time; time.sleep(0.005); return np.full")
    )
    chance = random.Random(3)
    command = [
        sys.executable,
        "-m",
        "trainpace",
        "precompute",
        f"{file}:Numbers",
        "--out",
        str(out),
        *FLAGS,
    ]
    kept = set()
    for _ in range(5):
        begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.2, 1.2))
        begun.send_signal(signal.SIGKILL)
        begun.wait()
        finished = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*.json")}
        assert kept <= set(finished.items())  # nothing finished is computed again
        kept = set(finished.items())
    assert run(f"{file}:Numbers", "--out", out, *FLAGS).returncode == 0
    assert read(out) == list(range(90))
    assert run("--verify", "--out", out).returncode == 0
    assert not list(out.glob(".shard-*"))


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.getuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True
        ).returncode
    ):
        pytest.skip("needs to mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


def test_full_disk_stops_precompute_and_rerun_completes(small_disk, tmp_path):
    # Samples are large only where the first inspection does not look.
    text = NUMBERS.replace(
        "(3, 5)", "(180, 180) if index in range(13, 25) or index in range(26, 38) else (9, 9)"
    )
    (tmp_path / "large.py").write_text(text)
    out = small_disk / "out"
    (small_disk / "ballast").write_bytes(bytes(2_000_000))
    command = [f"{tmp_path}/large.py:Numbers", "--out", out, "--workers", "1", "--shard-samples"]
    for samples in (45, 90):  # full with a shard still to come, and with the last one
        whole = run(*command, samples, "--again")
        assert whole.returncode == 2
        assert "has run full" in whole.stderr
        assert not list(out.glob(".shard-*"))
    full = run(*command, 10, "--again")
    assert full.returncode == 2
    assert "would run full" in full.stderr or "has run full" in full.stderr
    there = len(list(out.glob("shard-*.json")))
    assert 0 < there < 9
    (small_disk / "ballast").unlink()
    # The space estimate is pessimistic: every unfinished shard might be as large as the largest.
    subprocess.run(["mount", "-o", "remount,size=9m", small_disk], check=True)
    again = run(*command, 10)
    assert f"as {9 - there} of 9 shards" in again.stdout, again.stderr
    assert read(out) == list(range(90))
    (tmp_path / "huge.py").write_text(NUMBERS.replace("(3, 5)", "(300, 300)"))
    refused = run(f"{tmp_path}/huge.py:Numbers", "--out", small_disk / "other", "--workers", "1")
    assert refused.returncode == 2
    assert "32.4 MB" in refused.stderr or "33 MB" in refused.stderr


def test_hanging_sample_is_reported(file, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_S", 0.4)
    file.write_text(
        NUMBERS.replace(
            "return np.full", "import time; time.sleep(1.5 * (index == 26)); return np.full"
        )
    )
    notes = []
    settings = Settings(
        target=f"{file}:Numbers", folder=str(tmp_path / "out"), workers=1, shard_samples=10
    )
    assert precompute(settings, note=notes.append).finished
    assert any("400 ms" in note and "samples 20 to" in note for note in notes)


def test_random_dataset_is_rejected_before_estimate(tmp_path):
    flipping = "import random\nclass D(list):\n    def __getitem__(self, i): return random.random() < 0.5\nflips = D(range(9))\n"
    (tmp_path / "flipping.py").write_text(flipping)
    done = run("flipping.py:flips", "--out", "out", "--estimate", cwd=tmp_path)
    assert done.returncode == 2
    assert "draws from the generator of Python" in done.stderr


def test_estimate_leaves_nothing_behind(file, tmp_path):
    file.write_text(
        NUMBERS.replace("return np.full", "import time; time.sleep(0.003); return np.full")
    )
    done = run(f"{file}:Numbers", "--out", tmp_path / "out", "--estimate", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pays"]
    assert found["costs"]["compute_s"] > 3e-3 > found["costs"]["read_s"]
    assert 60 < found["costs"]["sample_bytes"] < 400
    assert {p.name for p in tmp_path.iterdir()} <= {file.name, "__pycache__"}
    never = run(
        f"{file}:Numbers",
        "--out",
        tmp_path / "out",
        "--estimate",
        "--step-ms",
        "500",
        "--batch",
        "8",
    )
    assert never.returncode == 1
    assert "No: the steps take longer than the data as it is." in never.stdout


COSTS = SampleCosts(
    samples=10_000,
    measured=64,
    compute_s=0.02,
    sample_bytes=1e5,
    read_s=1e-4,
    read_cold_s=1e-3,
    memory_bytes=10**10,
    free_bytes=10**11,
)


def test_decision_computes_epochs_until_precompute_pays():
    plain = decide(COSTS, workers=2)
    assert (plain.compute_once_s, plain.epoch_now_s, plain.epoch_after_s) == (
        100.0,
        100.0,
        pytest.approx(0.5),
    )
    assert plain.pays
    assert plain.epochs_to_pay == pytest.approx(100 / 99.5)
    beside_steps = decide(COSTS, workers=2, step_s=0.32, batch=64)
    assert beside_steps.epoch_after_s == pytest.approx(157 * 0.32)
    assert beside_steps.epochs_to_pay == pytest.approx(100 / (100 - 157 * 0.32))
    assert not decide(COSTS, workers=2, step_s=0.32, batch=64, epochs=2).pays
    assert decide(COSTS, workers=2, step_s=0.32, batch=64, epochs=3).pays


def test_decision_considers_disk_space_and_read_speed():
    from msgspec.structs import replace

    large = decide(replace(COSTS, sample_bytes=2e6), workers=2)
    assert not large.from_cache
    assert large.epoch_after_s == pytest.approx(5.0)
    assert (
        decide(replace(COSTS, sample_bytes=2e7), workers=2).reason
        == "there is not enough room on the disk"
    )
    assert (
        "reading back takes 200% of computing"
        in decide(replace(COSTS, compute_s=5e-5), workers=2).reason
    )


def test_excessive_dataset_length_is_rejected(tmp_path):
    (tmp_path / "endless.py").write_text(
        "class Endless:\n"
        "    def __len__(self): return 10**18\n"
        "    def __getitem__(self, index): return {'x': float(index)}\n"
    )
    done = run(f"{tmp_path}/endless.py:Endless", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "would make more than 1,000,000 shards" in done.stderr
    assert "--shard-samples" in done.stderr
    assert not list((tmp_path / "out").glob("*.json"))
