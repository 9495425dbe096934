"""How good are `trainpace watch` and `diagnose`: verdicts, planted milliseconds, savings foretold, and the cost of watching.

Run on a machine that does nothing else: python benchmarks/diagnose.py [cases crowded overhead peer] [--only NAME ...]. Each
part prints its lines and keeps them in benchmarks/results/diagnose.md. On two cores all parts take about 40 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainpace.diagnose import Diagnosis, diagnose, split, with_workers_ms
from trainpace.watch import COMMAND_FILE, Recording, environment, read_recording

HERE = Path(__file__).parent
RESULT = HERE / "results" / "diagnose.md"
sys.path.insert(0, str(HERE / "planted"))

from cases import CASES, Case  # noqa: E402
from launch import environment as engines  # noqa: E402
from launch import in_turns, run  # noqa: E402
from truth import Truth, read_truth, truth_of  # noqa: E402

TRIALS: dict[str, object] = {
    "block_steps": 6,
    "rounds": 3,
    "warm_up_steps": 8,
    "limit_s": 60,
    "budget_s": 20,
}
PAIRS = 12
BARE_RUNS = 2
PREDICTED: dict[str, str | tuple[str, float]] = {
    # what the fix of a case changes, in the words of the diagnosis: an advice's beginning, or a share of a cause
    "slow_decode": "prepare samples",
    "slow_augment": "prepare samples",
    "slow_collate": "prepare samples",
    "lists_in_samples": "arrays instead",
    "many_threads": "per process instead of",
    "hf_tokenise": "prepare samples",
    "busy_workers": "prepare samples",
    "accelerate_compressed": "prepare samples",
    "accumulation_storage": ("data", 1.0),
    "too_few_workers": ("workers", 4),
    "slow_storage": ("workers", 8),
    "lightning_storage": ("workers", 4),
    "loader_recreated": "keep the loader",
    "host_to_device": "copy less",
    "launch_samples": "compute all samples",
    "lightning_launch": ("launch", 1.0),
    "optimizer_embedding": "(fused)",
    "hf_optimizer": "(fused)",
    "ddp_slow_link": ("communication", 1 / 2),
    "ddp_accumulation": "exchange gradients once",
    "ddp_embedding": ("communication", 7 / 8),
    "fsdp2_gather": ("communication", 1 / 3),
    "deepspeed_zero2": "exchange gradients once",
    "ddp_straggler": "repair straggler rank",
    "ddp_lengths": "repair straggler rank",
    "log_remote": ("logging", 49 / 50),
    "log_items": ("own_code", 49 / 50),
    "collect_garbage": ("own_code", 1.0),
    "checkpoint_often": ("checkpoint", 1 - 2 / 50),
    "lightning_checkpoint": ("checkpoint", 1 - 5 / 45),
    "evaluate_often": ("evaluation", 1 - 10 / 50),
    "hf_evaluate": ("evaluation", 1 - 10 / 40),
}


class Row(NamedTuple):
    """One case: what was said, and what is true."""

    case: Case
    said: str
    right: bool
    step_ms: float
    fixed_ms: float | None
    saved_ms: float | None
    foretold_ms: float | None
    planted_ms: float | None
    found_ms: float | None
    same_losses: bool


def cases(only: list[str]) -> list[str]:
    """Every planted script: diagnosed, then trained plainly with and without its cause, in turns."""
    rows = []
    for case in CASES:
        if only and case.name not in only:
            continue
        try:
            rows.append(one_case(case))
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
            rows.append(Row(case, "no answer", False, 0, None, None, None, None, None, False))
        print(line(rows[-1]), flush=True)
    right = sum(r.right for r in rows)
    close = [
        abs(r.foretold_ms - r.saved_ms) <= 0.15 * abs(r.saved_ms)
        for r in rows
        if r.foretold_ms is not None and r.saved_ms is not None
    ]
    planted = [
        abs(r.found_ms - r.planted_ms) <= max(0.05 * r.planted_ms, 0.3)
        for r in rows
        if r.found_ms is not None and r.planted_ms is not None
    ]
    return [
        f"verdict right in {right} of {len(rows)}; planted ms within 5 % or 0.3 ms in {sum(planted)} of {len(planted)}; "
        f"saving foretold within 15 % in {sum(close)} of {len(close)}; losses the same under watch in "
        f"{sum(r.same_losses for r in rows)} of {len(rows)}; {BARE_RUNS} bare runs each way",
        "",
        "| case | engine | ranks | true cause | said | step ms | fixed ms | saved ms | foretold ms | off | planted | found |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(line(r) for r in rows),
    ]


def line(r: Row) -> str:
    """One row of the table."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    off = (
        ""
        if r.foretold_ms is None or not r.saved_ms
        else f"{100 * (r.foretold_ms / r.saved_ms - 1):+.0f} %"
    )
    said = r.said if r.right else f"**{r.said}**"
    cells = [
        r.case.name,
        r.case.engine,
        str(r.case.ranks),
        r.case.expected,
        said,
        number(r.step_ms),
        number(r.fixed_ms),
        number(r.saved_ms),
        number(r.foretold_ms),
        off,
        number(r.planted_ms),
        number(r.found_ms),
    ]
    return f"| {' | '.join(cells)} |"


def one_case(case: Case) -> Row:
    """Diagnose; then truth without any tool, unfixed and fixed in turns; then watch once for planted time and losses."""
    recording = recorded(case, TRIALS)[0]
    found = diagnose(recording)
    slow, fast = [], []
    for _ in range(BARE_RUNS):
        slow.append(truth_of(case).mean_ms)
        if case.fix is not None:
            fast.append(truth_of(case, fixed=True).mean_ms)
    watched, truth, same = recorded(case, None)
    step, fixed = statistics.mean(slow), statistics.mean(fast) if fast else None
    saved = None if fixed is None else step - fixed
    planted = truth.planted_ms if truth is not None and case.planted_ms else None
    return Row(
        case,
        found.verdict,
        found.verdict in case.accepted,
        step,
        fixed,
        saved,
        foretold(case, recording, found),
        planted,
        None
        if planted is None
        else part_of(case, watched) - part_of(case, recorded(case, None, fixed=True)[0]),
        same,
    )


def recorded(
    case: Case, trials: dict[str, object] | None, fixed: bool = False
) -> tuple[Recording, Truth | None, bool]:
    """A run of the case under the recorder; by the script's own clock; whether its losses were a bare run's."""
    with tempfile.TemporaryDirectory() as folder:
        logs, times, losses, bare = (
            Path(folder) / name for name in ("trails", "times", "losses", "bare")
        )
        logs.mkdir()
        env = environment(logs, engines(), trials)
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(HERE.parent / "src")])
        outcome = run(
            case, fixed=fixed, env={**env, "STEP_TIMES": str(times), "LOSSES": str(losses)}
        )
        note = {"command": [case.name], "seconds": 0.0, "exit_code": 0}
        (logs / COMMAND_FILE).write_text(json.dumps(note))
        recording = read_recording(logs)
        if not recording.ranks:
            raise RuntimeError(f"nothing recorded: {recording.seen}\n{outcome.output[-1500:]}")
        if trials is not None or fixed:
            return recording, None, False
        run(case, env={"LOSSES": str(bare)})
        own = f".{case.planted_rank}" if case.ranks > 1 else ""
        same = Path(f"{losses}{own}").read_text() == Path(f"{bare}{own}").read_text()
        return recording, read_truth(Path(f"{times}{own}")), same


def part_of(case: Case, recording: Recording) -> float:
    """Milliseconds of the part that the planted time lies in, on its rank: with and without the plant, their difference is it."""
    rank = next(r for r in recording.ranks if r.rank == case.planted_rank)
    return rank.parts_ms[case.part]


def foretold(case: Case, recording: Recording, found: Diagnosis) -> float | None:
    """What the diagnosis says that this case's fix saves."""
    change = PREDICTED.get(case.name)
    if change is None:
        return None
    if isinstance(change, str):
        return next(
            (a.saves_ms for a in (*found.advice, *found.not_worth) if change in a.title), None
        )
    cause, share = change
    parted = split(recording.ranks)
    if cause == "workers":
        occasional = sum(parted.by_cause[c] for c in ("checkpoint", "evaluation", "trainpace"))
        return found.step_ms - occasional - with_workers_ms(recording.ranks, parted, int(share))
    return parted.by_cause[cause] * share


def crowded(only: list[str]) -> list[str]:
    """Every planted script diagnosed once while another program keeps one core busy: verdicts, and wrong ones said proved."""
    lines = ["| case | true cause | said | proved |", "|---|---|---|---|"]
    right = wrong = tried = 0
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for case in CASES:
            if only and case.name not in only:
                continue
            tried += 1
            try:
                found = diagnose(recorded(case, TRIALS)[0])
            except Exception as error:
                print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
                lines.append(f"| {case.name} | {case.expected} | **no answer** | |")
                continue
            is_right = found.verdict in case.accepted
            proved = next(s.proved for s in found.shares if s.cause == found.verdict)
            right, wrong = right + is_right, wrong + (proved and not is_right)
            said = found.verdict if is_right else f"**{found.verdict}**"
            lines.append(f"| {case.name} | {case.expected} | {said} | {'yes' if proved else ''} |")
            print(lines[-1], flush=True)
    finally:
        other.kill()
        other.wait()
    head = f"verdict right in {right} of {tried} while one of {os.cpu_count()} cores is taken; wrong and proved: {wrong}"
    return [head, "", *lines]


_ENCODER = """
import json, os, statistics, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
encoder = [nn.TransformerEncoder(layer, 4)] if "ENCODER" in os.environ else []
model = nn.Sequential(*encoder, nn.Flatten(), nn.Linear(64 * 16, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(6400, 16, 64), torch.randint(10, (6400,)))
times, losses = [], []
last = time.perf_counter()
for x, y in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    now = time.perf_counter()
    times.append(now - last)
    last = now
with open(os.environ["LOSSES"], "w") as file:
    json.dump([1e3 * statistics.median(times[40:]), 1e3 * statistics.mean(times[40:]), repr(losses)], file)
"""


def overhead(only: list[str]) -> list[str]:
    """Step time watched against bare: of ten milliseconds, and of next to nothing, where it is more than noise."""
    ten, tiny = pairs(encoder=True), pairs(encoder=False)
    low, middle, high = statistics.quantiles(
        [100 * (watched[0] / bare[0] - 1) for bare, watched in ten], n=4
    )
    low_us, middle_us, high_us = statistics.quantiles(
        [1e3 * (watched[0] - bare[0]) for bare, watched in tiny], n=4
    )
    same = all(watched[2] == bare[2] for bare, watched in (*ten, *tiny))
    ten_ms, tiny_ms = (statistics.median(bare[0] for bare, _ in found) for found in (ten, tiny))
    return [
        f"overhead on a step of {ten_ms:.1f} ms: {middle:+.2f} % at the median of {PAIRS} pairs in turns (quartiles "
        f"{low:+.2f} to {high:+.2f}); losses {'identical' if same else 'DIFFERENT'} in all pairs",
        "",
        f"a step of {tiny_ms:.2f} ms takes {middle_us:.0f} us more at the median of {PAIRS} pairs in turns (quartiles"
        f" {low_us:.0f} to {high_us:.0f})",
    ]


def pairs(encoder: bool) -> list[tuple[list[Any], list[Any]]]:
    """(bare, watched) runs, each in a process of its own, in turns: the median and mean step in ms, and the losses."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(_ENCODER)
        for i in range(PAIRS):
            pair = {}
            for which in in_turns(i):
                target, logs = Path(folder) / f"{which}-{i}", Path(folder) / f"trails-{i}"
                env = {
                    **os.environ,
                    "LOSSES": str(target),
                    "OMP_NUM_THREADS": "1",
                    **({"ENCODER": "1"} if encoder else {}),
                }
                if which == "watched":
                    logs.mkdir()
                    env = environment(logs, env)
                subprocess.run([sys.executable, str(script)], env=env, check=True)
                pair[which] = json.loads(target.read_text())
            found.append((pair["bare"], pair["watched"]))
    return found


def peer(only: list[str]) -> list[str]:
    """What TraceML says of the same scripts, in its words; right where the words name the cause."""
    from traceml import traceml_says

    lines = ["| case | true cause | TraceML 0.5.0 says |", "|---|---|---|"]
    for case in CASES:
        if only and case.name not in only:
            continue
        try:
            said = traceml_says(case).verdict
        except Exception as error:
            said = f"no verdict ({str(error).splitlines()[0]})"
        lines.append(f"| {case.name} | {case.expected} | {said} |")
        print(lines[-1], flush=True)
    return lines


PARTS: dict[str, Callable[[list[str]], list[str]]] = {
    "cases": cases,
    "crowded": crowded,
    "overhead": overhead,
    "peer": peer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], help=" ".join(PARTS))
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    for name in arguments.parts or PARTS:
        lines = PARTS[name](arguments.only)
        print("\n".join(lines), flush=True)
        keep(f"{name}, some again" if arguments.only else name, lines)


def keep(part: str, lines: list[str]) -> None:
    """Put a part's lines in place of the older ones."""
    import torch

    head = f"## {part}"
    stamp = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    old = (
        RESULT.read_text()
        if RESULT.exists()
        else "# trainpace watch and diagnose (`python -m benchmarks diagnose`)\n"
    )
    sections = old.split("\n## ")
    kept = [s for s in sections[1:] if not s.startswith(f"{part}\n")]
    body = "\n".join([head, "", stamp, "", *lines, ""])
    RESULT.write_text(
        "\n".join([sections[0].rstrip("\n"), *(f"\n## {s}".rstrip("\n") for s in kept), "", body])
    )


if __name__ == "__main__":
    main()
