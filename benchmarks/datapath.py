"""How good is `trainpace precompute`, and reading back: against the peers, killed, damaged, on a full disk, exactly once.

Run on a machine that does nothing else: python benchmarks/datapath.py [computing reading killed damaged full]. Each part
prints its lines and keeps them in benchmarks/results/datapath.md. All parts take about a quarter of an hour on two cores.
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
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainpace.measure.detection import detect

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULT = HERE / "results" / "datapath.md"
PHOTOS = ROOT / "out" / "photos"
PEERS = ROOT / ".peers"
COUNT, ROUNDS, KILLS = 4000, 5, 50
ENVIRONMENT = {
    **os.environ,
    "PHOTO_FOLDER": str(PHOTOS),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT / 'src'}:{PEERS}",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}
READERS = {
    "memmap": "numpy memmap, a sample at a time",
    "memmap_batches": "numpy memmap, `images[indices]`",
    "huggingface": "Hugging Face datasets, map-style",
    "litdata": "litdata",
    "webdataset": "webdataset",
    "trainpace": "`ShardDataset.loader`",
    "trainpace_plain": "`ShardDataset` in a plain DataLoader",
}
SHUFFLING_PEERS = ("huggingface", "litdata", "webdataset")


def _peers(*arguments: object) -> str:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "datapath_peers.py"),
        *map(str, arguments),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=ENVIRONMENT
    ).stdout


def _precompute(target: str, folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _command(target, folder, *options), capture_output=True, text=True, env=ENVIRONMENT
    )


def _command(target: str, folder: Path, *options: object) -> list[str]:
    return [
        sys.executable,
        "-m",
        "trainpace",
        "precompute",
        target,
        "--out",
        str(folder),
        "--workers",
        "2",
        *map(str, options),
    ]


def _photos(folder: Path) -> None:
    done = _precompute(f"{HERE / 'photo_dataset.py'}:Photos", folder)
    assert done.returncode == 0, done.stderr


def computing(place: Path) -> list[str]:
    """Whole commands, from start to end, in turns: photographs decoded and resized into files."""
    ways: dict[str, Callable[[Path], object]] = {
        "`trainpace precompute`": _photos,
        "Hugging Face `map(num_proc=2)`": lambda folder: _peers("write", "huggingface", folder),
        "litdata `optimize`": lambda folder: _peers("write", "litdata", folder),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS + 1):
        for name, way in sorted(ways.items(), reverse=bool(i % 2)):
            target = place / "computed"
            start = time.perf_counter()
            way(target)
            if i:  # the first round warms the page cache
                rates[name].append(COUNT / (time.perf_counter() - start))
            shutil.rmtree(target)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    own, *peers = medians.values()
    ratios = [a / max(b) for a, *b in zip(*rates.values(), strict=True)]
    lines = [
        f"| {name} | {medians[name]:.0f} | {min(found):.0f} to {max(found):.0f} |"
        for name, found in rates.items()
    ]
    return [
        f"## Computing {COUNT} photographs (JPEG decode, Lanczos to 160 x 160), whole command, {ROUNDS} rounds in turns",
        "",
        "| | samples/s, median | range |",
        "|---|---|---|",
        *lines,
        "",
        f"Against the better peer: {own / max(peers):.2f} (medians), {min(ratios):.2f} to {max(ratios):.2f} by round."
        " To reach: 1.2.",
    ]


def reading(place: Path) -> list[str]:
    """Shuffled epochs in batches of 64, a process each, in turns; the first epoch of each process does not count."""
    folders = {
        name: place / name for name in ("huggingface_kept", "litdata", "webdataset", "memmap")
    }
    for name, folder in folders.items():
        _peers("write", name, folder)
    _photos(place / "trainpace")
    where = {name: folders.get(name.split("_")[0], place / name.split("_")[0]) for name in READERS}
    where["huggingface"] = folders["huggingface_kept"]
    lines, verdicts = [], []
    rates: dict[tuple[str, int], list[float]] = {}
    for i in range(ROUNDS):
        for workers in (0, 2):
            for name in sorted(READERS, reverse=bool(i % 2)):
                found = json.loads(_peers("read", name, where[name], workers).splitlines()[-1])
                assert set(found["samples"]) == {COUNT}, f"{name} gave {found['samples']} samples"
                rate = statistics.median(
                    n / s for n, s in zip(found["samples"], found["seconds"], strict=True)
                )
                rates.setdefault((name, workers), []).append(rate)
    median = {key: statistics.median(found) for key, found in rates.items()}
    for name, title in READERS.items():
        cells = [
            f"{median[name, w]:.0f} | {min(rates[name, w]):.0f} to {max(rates[name, w]):.0f}"
            for w in (0, 2)
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for workers in (0, 2):
        peer = max(median[name, workers] for name in SHUFFLING_PEERS)
        for name in ("trainpace", "trainpace_plain"):
            own = median[name, workers]
            verdicts.append(
                f"- {READERS[name]}, {workers} workers: {own / peer:.2f} of the best peer that shuffles (to reach: 1.0),"
                f" {own / median['memmap', workers]:.2f} of memmap (to reach: 0.8),"
                f" {own / median['memmap_batches', workers]:.2f} of memmap in whole batches"
            )
    return [
        f"## Reading {COUNT} photographs back, samples/s, shuffled, batches of 64, {ROUNDS} rounds in turns",
        "",
        "| | 0 workers | range | 2 workers | range |",
        "|---|---|---|---|---|",
        *lines,
        "",
        *verdicts,
    ]


_SLOW = """
import time
import numpy as np
class Slow:
    def __len__(self): return 600
    def __getitem__(self, index):
        time.sleep(0.003)
        return np.random.default_rng(index).integers(0, 256, {shape}, dtype=np.uint8), index
"""


def _slow(place: Path, shape: str = "(64, 64)") -> str:
    place.mkdir(exist_ok=True)
    (place / "slow_dataset.py").write_text(_SLOW.replace("{shape}", shape))
    return f"{place / 'slow_dataset.py'}:Slow"


def _whole(folder: Path) -> bool:
    """Each of the 600 samples once, with its own content."""
    import numpy as np

    from trainpace.shards import ShardDataset

    data = ShardDataset(folder)
    return len(data) == 600 and all(
        int(data[i][1]) == i
        and (
            data[i][0]
            == np.random.default_rng(i).integers(0, 256, data[i][0].shape, dtype=np.uint8)
        ).all()
        for i in range(600)
    )


def killed(place: Path) -> list[str]:
    """SIGKILL at random moments of the whole; then the same command again, over and over."""
    target, folder = _slow(place), place / "killed"
    chance = random.Random(0)
    kept: set[tuple[str, int]] = set()
    recomputed = restarts = kills = 0
    while kills < KILLS:
        begun = subprocess.Popen(
            _command(target, folder, "--shard-samples", 20),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        time.sleep(chance.uniform(0.05, 1.2))
        finished = begun.poll() == 0
        begun.send_signal(signal.SIGKILL)
        begun.wait()
        now = {(path.name, path.stat().st_mtime_ns) for path in folder.glob("shard-*.json")}
        recomputed += len(kept - now)
        kept = now
        kills += not finished
        if finished:  # all shards are there: begin anew
            restarts += 1
            assert _whole(folder)
            shutil.rmtree(folder)
            kept = set()
    done = _precompute(target, folder, "--shard-samples", 20)
    assert done.returncode == 0, done.stderr
    good = _whole(folder) and _precompute(target, folder, "--verify").returncode == 0
    return [
        "## Killed",
        "",
        f"{KILLS} kill -9 at random moments over {restarts + 1} folders of 600 samples: {recomputed} finished shards computed"
        f" again, every sample there once with its own content: {'yes' if good else 'NO'}.",
    ]


def damaged(place: Path) -> list[str]:
    """One shard truncated, one with a flipped bit at each of 20 places, one missing: named, and computed again alone."""
    target, folder = _slow(place), place / "damaged"
    assert _precompute(target, folder, "--shard-samples", 60).returncode == 0
    chance, right = random.Random(0), 0
    for _ in range(20):
        numbers = chance.sample(range(10), 3)
        files = [folder / f"shard-{n:06d}.parquet" for n in numbers]
        before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
        with open(files[0], "r+b") as file:
            file.truncate(chance.randrange(files[0].stat().st_size))
        with open(files[1], "r+b") as file:
            place_ = chance.randrange(files[1].stat().st_size)
            file.seek(place_)
            byte = file.read(1)[0]
            file.seek(place_)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))
        files[2].unlink()
        named = json.loads(_precompute(target, folder, "--verify", "--json").stdout)["damaged"]
        words = {d["number"]: d["problem"].split(":")[0] for d in named}
        mended = _precompute(target, folder, "--repair")
        after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
        only = {name for name in after if after[name] != before[name]} == {
            path.name for path in files
        }
        right += (
            words == dict(zip(numbers, ("truncated", "changed", "missing"), strict=True))
            and mended.returncode == 0
            and only
            and _whole(folder)
        )
    return [
        "## Damaged",
        "",
        "A truncated, a flipped (one bit anywhere) and a missing shard, 20 times: named rightly and repaired alone"
        f" {right} of 20.",
    ]


def full(place: Path) -> list[str]:
    """A file system of 4 MB fills up while shards are computed; needs to mount."""
    disk = place / "disk"
    disk.mkdir()
    target = _slow(place / "code", "(96, 96) if index % 85 in range(20, 60) else (8, 8)")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        return [
            "## A full disk",
            "",
            "Not done: this machine does not let a file system be mounted.",
        ]
    try:
        folder = disk / "shards"
        stopped = _precompute(target, folder, "--shard-samples", 20)
        there = {(path.name, path.stat().st_mtime_ns) for path in folder.glob("shard-*.json")}
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        went_on = _precompute(target, folder, "--shard-samples", 20)
        now = {(path.name, path.stat().st_mtime_ns) for path in folder.glob("shard-*.json")}
        good = went_on.returncode == 0 and there <= now and _whole(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return [
        "## A full disk",
        "",
        f'tmpfs of 3 MB: exit code {stopped.returncode}, "{stopped.stderr.strip().replace(str(place), "")}" {len(there)} of 30'
        f" shards kept; with more room the rest computed, nothing again, all 600 right: {'yes' if good else 'NO'}.",
    ]


PARTS = {
    "computing": computing,
    "reading": reading,
    "killed": killed,
    "damaged": damaged,
    "full": full,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    chosen = parser.parse_args().parts or list(PARTS)
    sys.path.insert(0, str(HERE))
    from photo_dataset import make_photos

    make_photos(PHOTOS, COUNT)
    processor = detect().cpu.name
    kept: dict[str, list[str]] = {}
    if RESULT.exists():  # parts that are not run now stay
        for section in RESULT.read_text().split("\n## ")[1:]:
            kept[section.splitlines()[0].split(" ")[0]] = f"## {section}".rstrip().splitlines()
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="trainpace-datapath-", dir=ROOT / "out") as place:
            lines = PARTS[name](Path(place))
        lines += [
            "",
            f"{datetime.date.today()}, load {os.getloadavg()[1]:.1f} over the last five minutes.",
        ]
        print("\n".join(lines), flush=True)
        kept[lines[0].removeprefix("## ").split(" ")[0]] = lines
        machine = f"{processor}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}."
        head = f"# The data path\n\n{machine}"
        RESULT.write_text(
            "\n\n".join([head, *("\n".join(section) for section in kept.values())]) + "\n"
        )


if __name__ == "__main__":
    main()
