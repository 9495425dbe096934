"""Tests of `look` on real scripts that run for a second or two."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from diagnose.recordings import rank, recording
from nouns import workload
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.outcome import Interval
from trainpace.core.records import save
from trainpace.diagnose import Advice, Diagnosis, Share
from trainpace.report import restored_notes
from trainpace.report.watch import untested
from trainpace.verbs.look import (
    Length,
    Looked,
    LookRequest,
    elsewhere,
    length_of,
    run,
    started_with_python,
)
from trainpace.verbs.request import Misuse, Silent
from trainpace.verbs.watch import Watched, busy_cores, busy_in_words

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 8, (4096,)))
for epoch in range(int(sys.argv[2])):
    for x, y in DataLoader(data, batch_size=32):
        with torch.autocast("cpu", torch.bfloat16, enabled="--bf16" in sys.argv):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(epoch, loss.item(), flush=True)
        time.sleep(0.002)
"""
DIAGNOSIS = Diagnosis(
    verdict="compute",
    why=(),
    step_ms=10.0,
    step_ms_low=9.0,
    step_ms_high=11.0,
    shares=(),
    proofs=(),
    advice=(),
    not_worth=(),
    steps_per_epoch=128.0,
    epochs=None,
    share_of_roof=None,
)


REQUEST = LookRequest(seconds=1.0)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def look(script, *more, seconds=1.0, **options):
    folder = script.parent / "recording"
    command = (sys.executable, str(script), *more)
    return run(
        LookRequest(command=command, seconds=seconds, output=str(folder), **options), Silent()
    )


@pytest.mark.slow
def test_look_ends_the_script_and_predicts_the_whole_training(script):
    looked = look(script, "--epochs", "100000", "--bf16")
    rank = looked.watched.recording.ranks[0]
    assert rank.stopped
    assert rank.complete
    assert rank.number_format == "amp_bf16"
    assert looked.watched.exit_code == 0
    assert looked.length == Length(
        steps=12_800_000, of="training", epochs=100_000.0, words="--epochs 100000"
    )
    assert looked.seconds == pytest.approx(12_800_000 * looked.diagnosis.step_ms / 1e3)
    assert looked.interval_s.low <= looked.seconds <= looked.interval_s.high
    assert looked.elsewhere, looked.not_elsewhere
    roles = [chosen.role for chosen in looked.elsewhere]
    assert roles[0].startswith("cheapest")
    assert roles[-1].endswith("fastest")
    usd = [chosen.match.mean_usd for chosen in looked.elsewhere]
    hours = [chosen.match.mean_hours for chosen in looked.elsewhere]
    assert usd == sorted(usd)
    assert hours == sorted(hours, reverse=True)
    assert all(
        chosen.match.forecast.execution.precision == "amp_bf16" for chosen in looked.elsewhere
    )
    printed = (looked.watched.folder / "output.txt").read_text().splitlines()
    assert len(printed) >= rank.steps


@pytest.mark.slow
def test_short_script_runs_to_its_own_end(script):
    looked = look(script, "--epochs", "1", seconds=300.0, epochs=3.0, gpu=("T4",))
    assert not looked.watched.recording.ranks[0].stopped
    assert looked.length.steps == 384
    assert [chosen.match.offer.device for chosen in looked.elsewhere] == ["T4"]


@pytest.mark.slow
def test_batch_without_a_loader_comes_from_the_model_input(script):
    loop = "for x, y in DataLoader(data, batch_size=32)"
    script.write_text(
        script.read_text().replace(
            loop, "for x, y in [(a[:32], b[:32]) for a, b in [data.tensors] * 400]"
        )
    )
    seen = look(script, "--epochs", "100000", gpu=("T4",))
    told = run(
        replace(REQUEST, command=seen.watched.recording.command, global_batch=64, gpu=("T4",)),
        Silent(),
    )
    batches = [looked.elsewhere[0].match.forecast.execution.global_batch for looked in (seen, told)]
    assert batches == [32, 64]


SAVES = """
import os, shutil, sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad(); model(torch.rand(4, 8)).sum().backward(); optimizer.step()
    if step % 20 == 0:
        torch.save(model.state_dict(), "last.pt")
        shutil.copyfile("last.pt", "best.pt")
        torch.save(model.state_dict(), "written.pt.tmp"); os.replace("written.pt.tmp", "written.pt")
        torch.save(model.state_dict(), "new.pt")
        with open("log.csv", "a" if step else "w") as log: log.write(f"{step};")
if len(sys.argv) > 2: raise SystemExit(3)
"""
EARLIER = ("last.pt", "best.pt", "written.pt", "log.csv")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "put_back"),
    [(("100000000",), True), (("200",), False), (("200", "fails"), True)],
    ids=str,
)
def test_look_restores_checkpoints_of_earlier_runs(tmp_path, monkeypatch, arguments, put_back):
    """Files are not restored if the script trained to its end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAVES)
    for name in EARLIER:
        (tmp_path / name).write_bytes(b"of an earlier run")
    if put_back:  # a killed look leaves the file under this name
        (tmp_path / "last.pt").rename(tmp_path / "last.pt.before-trainpace-look")
    looked = run(
        replace(REQUEST, command=(sys.executable, "train.py", *arguments), output="recording"),
        Silent(),
    )
    kept = [(tmp_path / name).read_bytes() == b"of an earlier run" for name in EARLIER]
    assert kept == [put_back] * 4
    assert (tmp_path / "new.pt").stat().st_size > 1000
    restored = {Path(name).name for name in looked.watched.recording.restored}
    assert restored == (set(EARLIER) if put_back else set())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*EARLIER, "new.pt", "recording", "train.py"]
    )


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step(tmp_path):
    ddp = Path(__file__).parents[2] / "benchmarks/planted/scripts/ddp_compute.py"
    launcher = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    command = (*launcher, str(ddp), "--steps", "2000")
    looked = run(LookRequest(command=command, seconds=2.0, output=str(tmp_path / "r")), Silent())
    ranks = looked.watched.recording.ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    assert all(rank.stopped for rank in ranks)
    assert ranks[0].steps == ranks[1].steps


@pytest.mark.slow
def test_failing_script_is_reported_with_its_output_and_exit_code(script):
    script.write_text("import torch\nprint('one moment')\nraise SystemExit(5)\n")
    with pytest.raises(
        TrainpaceError, match=r"exit code 5 before its second training step:\n  one moment"
    ) as raised:
        look(script)
    assert raised.value.exit_code == 5


def _looked(folder, **of_rank):
    return Looked(
        watched=Watched(recording=recording(rank(forward=10, **of_rank)), folder=folder),
        diagnosis=DIAGNOSIS,
        length=Length(steps=10, of="steps"),
        seconds=1.0,
        interval_s=Interval(low=1.0, high=1.0, coverage=0.9, basis=""),
    )


def test_float64_model_has_no_forecast(tmp_path):
    (tmp_path / "workload.json").write_text("{}")
    with pytest.raises(TrainpaceError, match="fp64"):
        elsewhere(_looked(tmp_path, number_format="fp64"), (), Silent())


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("", r"training's model\. So there is no forecast"),
        ("no item()", r"model: no item\(\)\. So there"),
    ],
)
def test_untraceable_model_has_no_forecast_and_the_reason_is_given(tmp_path, reason, told):
    with pytest.raises(TrainpaceError, match=told):
        elsewhere(_looked(tmp_path, no_workload=reason), (), Silent())


def test_forecast_uses_the_only_traced_batch_size(tmp_path):
    """The loader's batch can differ: it may hold lines of text with time as first dimension."""
    save(replace(workload(), traced_batches=(7,)), tmp_path / "workload.json")
    looked = Looked(
        watched=Watched(recording=recording(rank(forward=10)), folder=tmp_path),
        diagnosis=DIAGNOSIS,
        length=Length(steps=10, of="steps"),
        seconds=1.0,
        interval_s=Interval(low=1.0, high=1.0, coverage=0.9, basis=""),
    )
    assert looked.watched.recording.ranks[0].samples_per_step != 7
    (found,) = elsewhere(looked, ("T4",), Silent())
    assert found.match.forecast.execution.micro_batch == 7
    cards = {e.match.offer.device: e for e in elsewhere(looked, ("RTX 3060", "T4"), Silent())}
    assert cards.keys() == {"RTX 3060", "T4"}
    assert cards["RTX 3060"].match.mean_usd == 0 < cards["RTX 3060"].match.mean_hours


def test_unknown_gpu_is_rejected_before_the_training(script):
    with pytest.raises(UnknownName):
        look(script, gpu=("RTX 30600",))
    assert not (script.parent / "recording").exists()


@pytest.mark.parametrize("rollouts", [False, True], ids=["own code", "rollouts"])
def test_own_code_counts_in_the_times_of_rented_cards(tmp_path, rollouts):
    save(workload(), tmp_path / "workload.json")
    looked = Looked(
        watched=Watched(
            recording=recording(rank(forward=10, other=30.8, collects_experience=rollouts)),
            folder=tmp_path,
        ),
        diagnosis=DIAGNOSIS,
        length=Length(steps=60_000, of="training"),
        seconds=1.0,
        interval_s=Interval(low=1.0, high=1.0, coverage=0.9, basis=""),
    )
    (found,) = elsewhere(looked, ("RTX 4090",), Silent())
    assert found.match.forecast.step.own_code_ms == 30.8
    assert found.match.mean_hours * 3600 > 60_000 * 0.0308
    assert found.included


@pytest.mark.slow
def test_look_output_fits_one_screen(script):
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    environment = {**os.environ, "COLUMNS": "80", "XDG_DATA_HOME": str(script.parent), "PATH": path}
    # short names as a user types them, since long paths add lines
    words = [str(bin_folder / "trainpace"), "look", "--for", "1s"]
    command, own = (
        ["python", script.name, "--epochs", "90"],
        {"cwd": script.parent, "env": environment},
    )
    done = subprocess.run([*words, *command], capture_output=True, text=True, timeout=120, **own)
    assert done.returncode == 0, done.stderr
    assert "The whole training (90 epochs, 11,520 steps) takes " in done.stdout
    assert "cheapest" in done.stdout
    unless_busy = re.sub(r"(?s)Note: other programs .*? too\s+long\.\n", "", done.stdout)
    lines = [line for line in unless_busy.splitlines() if str(script.parent) not in line]
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    as_json = subprocess.run(
        [*words, "--json", *command], capture_output=True, text=True, timeout=120, **own
    )
    assert json.loads(as_json.stdout)["length"]["steps"] == 11_520


def test_busy_cores_of_other_programs_are_reported():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        busy = busy_cores(None)
        other.kill()
    assert busy > 0.5
    assert busy_in_words(1.0, 2) == ""
    assert busy_in_words(1.3, 2).startswith("other programs keep 1.3 of 2 cores busy, so")
    assert busy_in_words(1.97, 2).startswith("other programs keep all 2 cores busy, so")


def test_look_without_a_command_raises_misuse():
    with pytest.raises(Misuse, match="training script"):
        run(LookRequest(), Silent())


def test_script_without_interpreter_is_started_with_python(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    assert started_with_python((str(script), "--x")) == (sys.executable, str(script), "--x")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert started_with_python((str(script),)) == ("python", str(script))
    assert started_with_python(("torchrun", "t.py")) == ("torchrun", "t.py")
    notebook = tmp_path / "train.ipynb"
    notebook.touch()
    assert started_with_python((str(notebook),)) == ("ipython", str(notebook))
    with pytest.raises(Misuse, match="no file"):
        started_with_python(("missing.py",))


def test_training_length_prefers_explicit_steps():
    by_script = replace(DIAGNOSIS, job_steps=3840, epochs=30.0, job_by="--epochs 30")
    assert length_of(by_script, None) == Length(
        steps=3840, of="training", epochs=30.0, words="--epochs 30"
    )
    assert length_of(by_script, 77) == Length(steps=77, of="training", words="as given")
    assert length_of(DIAGNOSIS, None) == Length(steps=128, of="epoch", epochs=1.0)
    endless = replace(DIAGNOSIS, steps_per_epoch=None)
    assert length_of(endless, None) == Length(steps=1000, of="steps")


def test_large_causes_without_advice_are_left_to_diagnose():
    shares = [
        Share(cause=cause, in_words=cause, ms=10 * share, share=share, proved=False)
        for cause, share in (
            ("compute", 0.6),
            ("optimizer", 0.25),
            ("own_code", 0.1),
            ("data", 0.05),
        )
    ]
    seen = replace(DIAGNOSIS, shares=tuple(shares))
    assert [s.cause for s in untested(seen)] == ["compute", "optimizer"]
    advice = Advice(cause="compute", title="", how="", saves_ms=1.0, ceiling_ms=1.0, basis="")
    assert [s.cause for s in untested(replace(seen, advice=(advice,)))] == ["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("holds", [False, True], ids=["opens for every line", "has it open"])
def test_files_written_by_another_program_are_not_restored(tmp_path, monkeypatch, capsys, holds):
    """Two trainings write the same log and checkpoint. The other one's changes are kept."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SAVES)
    for name in EARLIER:
        (tmp_path / name).write_bytes(b"of an earlier run;")
    other = """
import contextlib, itertools, os, pathlib, sys, time
held = open("log.csv", "a") if len(sys.argv) > 1 else None
while not pathlib.Path("new.pt").exists():
    time.sleep(0.01)
time.sleep(0.1)
for i in itertools.count():
    with contextlib.nullcontext(held) if held else open("log.csv", "a") as log:
        print(f"other {i};", end="", file=log, flush=True)
    pathlib.Path("other.pt").write_text(f"other {i};")
    os.replace("other.pt", "last.pt")
    time.sleep(0.05)
"""
    with subprocess.Popen(
        [sys.executable, "-c", other, *(["held"] if holds else [])], cwd=tmp_path
    ) as training:
        looked = run(
            replace(REQUEST, command=(sys.executable, "train.py", "100000000"), output="recording"),
            Silent(),
        )
        training.kill()
    recording = looked.watched.recording
    assert {Path(name).name for name in recording.restored} == {"best.pt", "written.pt"}
    assert {Path(name).name for name in recording.left} == {"last.pt", "log.csv"}
    log = (tmp_path / "log.csv").read_text()
    first, last = (
        int(part.removeprefix("other "))
        for part in (re.findall(r"other \d+", log)[i] for i in (0, -1))
    )
    assert first == 0 or not holds
    assert [f"other {i};" in log for i in range(first, last)] == [True] * (last - first)
    assert last > 20
    kept = {path.name: path.read_bytes()[:18] for path in Path("recording", "earlier").iterdir()}
    assert kept == {"last.pt": b"of an earlier run;", "log.csv": b"of an earlier run;"}
    assert not list(tmp_path.glob("*before-trainpace*"))
    *_, note = restored_notes(recording, looked.watched.folder)
    assert "last.pt and log.csv" in note
