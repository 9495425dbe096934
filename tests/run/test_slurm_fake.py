"""The Slurm launcher with fake Slurm commands."""

from pathlib import Path

import pytest

from interrupting import interrupt_when, may_leave_a_file_open
from trainpace.core.errors import TrainpaceError
from trainpace.run import slurm
from trainpace.run.job import Job
from trainpace.run.slurm import Slurm, SlurmOptions

LAUNCHER = Slurm(poll_s=0.01)


class Fake:
    """Fake Slurm. `sbatch` returns job 7; each squeue call runs the next shell line of `answers`, and the last one repeats."""

    def __init__(self, folder):
        self.folder = folder
        self.write("sbatch", 'cp "$2" script; echo 7')
        self.write("scontrol", "exit 1")
        self.write("scancel", 'echo "$@" >> cancelled; touch done-for')
        self.write(
            "squeue",
            "n=$(cat asked 2>/dev/null || echo 0); echo $((n + 1)) > asked; . ./answer$n 2>/dev/null || . ./last",
        )

    def write(self, name, code):
        (self.folder / name).write_text(f'#!/bin/bash\ncd "{self.folder}"\n{code}\n')
        (self.folder / name).chmod(0o755)

    def answers(self, *snippets):
        for i, snippet in enumerate(snippets[:-1]):
            (self.folder / f"answer{i}").write_text(snippet)
        (self.folder / "last").write_text(snippets[-1])

    @property
    def cancelled(self):
        file = self.folder / "cancelled"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name, value in (
        ("PATIENCE_S", dict.fromkeys(slurm.PATIENCE_S, 0.3)),
        ("CONTROLLER_S", 0.5),
        ("GRACE_S", 0.3),
    ):
        monkeypatch.setattr(slurm, name, value)
    return Fake(tmp_path / "bin")


@pytest.fixture
def job(tmp_path):
    return Job(
        name="trial",
        program=("rank.py",),
        folder=str(tmp_path / "job"),
        result=str(tmp_path / "job" / "result.json"),
        timeout_s=100.0,
    )


def row(state, reason="None", restarts=0, used="0:05", code=0, number="7"):
    return f"echo '{number}|{state}|{reason}|{restarts}|{used}|{code}|'"


def leaving(job, *more):
    return "\n".join([f"echo '{{}}' > {job.result}", *more])


UNTIL_CANCELLED = "if [ -e done-for ]; then {}; else {}; fi"


def test_job_with_result_is_done(fake, job):
    said = []
    log = f"echo 'step 1' >> {job.folder}/trial.log"
    fake.answers(
        row("PENDING", "Resources"),
        f"{row('RUNNING')}; {log}",
        leaving(job, row("COMPLETED", used="1:02")),
    )
    ended = LAUNCHER.run(job, said.append)
    assert (ended.state, ended.reason, ended.seconds, ended.exit_code, ended.attempts) == (
        "done",
        "",
        62.0,
        0,
        1,
    )
    assert said == [
        "slurm: job 7, trial, waits in the queue (Resources)",
        "slurm: job 7, trial, runs",
        "step 1",
    ]
    assert (
        (fake.folder / "script").read_text()
        == LAUNCHER.text(job)
        == Path(job.folder, "trial.sbatch").read_text()
    )
    assert not fake.cancelled


def test_job_with_result_is_done_despite_slurm_state(fake, job):
    fake.answers(leaving(job, row("FAILED", code=256)))
    assert LAUNCHER.run(job).state == "done"
    fake.answers(
        "echo 'slurm_load_jobs error: Invalid job id specified' >&2; " + leaving(job, "false")
    )
    assert LAUNCHER.run(job).state == "done"


def test_job_without_result_has_failed(fake, job):
    Path(job.folder).mkdir()
    Path(job.result).write_text("of an earlier run")
    error = f"printf 'Traceback (most recent call last):\\nValueError: odd\\n' >> {job.folder}/trial.log"
    fake.answers(row("RUNNING"), f"{error}; {row('FAILED', code=256)}")
    ended = LAUNCHER.run(job)
    assert (ended.state, ended.reason, ended.exit_code) == ("failed", "ValueError: odd", 1)
    assert ended.tail.endswith("ValueError: odd")


def test_delayed_result_file_is_awaited(fake, job):
    fake.answers(*[row("COMPLETED")] * 3, leaving(job, row("COMPLETED")))
    assert LAUNCHER.run(job).state == "done"
    fake.answers(row("COMPLETED"))
    assert LAUNCHER.run(job).reason == "trial left no result: it ended with exit code 0."


def test_requeued_job_is_followed_to_its_end(fake, job):
    said = []
    fake.answers(
        row("RUNNING"),
        row("NODE_FAIL"),
        row("COMPLETING", restarts=1),
        row("PENDING", "BeginTime", 1),
        row("RUNNING", restarts=1),
        leaving(job, row("COMPLETED", restarts=1)),
    )
    ended = LAUNCHER.run(job, said.append)
    assert (ended.state, ended.attempts) == ("done", 2)
    assert [line.removeprefix("slurm: job 7, trial, ") for line in said] == [
        "runs",
        "waits in the queue (BeginTime)",
        "runs, attempt 2",
    ]


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED"])
def test_job_not_requeued_has_failed(fake, job, state):
    fake.answers(row("RUNNING"), row(state))
    ended = LAUNCHER.run(job)
    assert ended.state == "failed"


def test_timeout_starts_when_job_runs(fake, job):
    cancelled, runs = row("CANCELLED", used="1:41", code=15), row("RUNNING", used="1:41")
    fake.answers(
        row("PENDING", "Priority", used="9:00:00"), UNTIL_CANCELLED.format(cancelled, runs)
    )
    ended = LAUNCHER.run(job)
    assert (ended.state, ended.reason) == ("timed out", "trial did not end within 1 min 40 s.")
    assert fake.cancelled == ["7"]


def test_job_that_hangs_after_result_is_done(fake, job):
    fake.answers(leaving(job, UNTIL_CANCELLED.format(row("CANCELLED"), row("RUNNING"))))
    assert LAUNCHER.run(job).state == "done"
    assert fake.cancelled == ["7"]


def test_job_cancelled_by_others_is_cancelled(fake, job):
    fake.answers(row("RUNNING"), row("CANCELLED by 0"))
    assert LAUNCHER.run(job).state == "cancelled"


def test_job_that_can_never_start_is_cancelled(fake, job):
    fake.answers(UNTIL_CANCELLED.format(row("CANCELLED"), row("PENDING", "PartitionTimeLimit")))
    ended = LAUNCHER.run(job)
    assert ended.state == "failed"
    assert "PartitionTimeLimit" in ended.reason
    assert fake.cancelled == ["7"]


def test_short_controller_outage_is_tolerated(fake, job):
    fake.answers(row("RUNNING"), "false", "false", leaving(job, row("COMPLETED")))
    assert LAUNCHER.run(job).state == "done"
    fake.answers(row("RUNNING"), "false")
    with pytest.raises(TrainpaceError, match="not answered"):
        Slurm(poll_s=0.05).run(job)
    assert fake.cancelled[:1] == ["7"]  # in case it comes back


@may_leave_a_file_open
def test_ctrl_c_cancels_job(fake, job):
    fake.answers(UNTIL_CANCELLED.format(row("CANCELLED"), row("RUNNING")))

    interrupt_when((fake.folder / "asked").exists)
    with pytest.raises(KeyboardInterrupt):
        LAUNCHER.run(job)
    assert fake.cancelled == ["7"]


@may_leave_a_file_open
def test_ctrl_c_during_submission_cancels_job(fake, job):
    fake.write("sbatch", "touch submitting; sleep 0.5; echo 7")

    interrupt_when((fake.folder / "submitting").exists)
    with pytest.raises(KeyboardInterrupt):
        LAUNCHER.run(job)
    assert fake.cancelled == ["7"]


def test_failed_cancel_prints_scancel_command(fake, job):
    fake.write("scancel", "exit 1")
    fake.answers(row("RUNNING"), "false")
    said = []
    with pytest.raises(TrainpaceError, match="not answered"):
        Slurm(poll_s=0.05).run(job, said.append)
    assert said[-1].endswith("scancel 7")


def test_rejected_submission_is_an_error(fake, job):
    fake.write(
        "sbatch",
        "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1",
    )
    with pytest.raises(TrainpaceError):
        LAUNCHER.run(job)


def test_missing_slurm_is_an_error(fake, job, monkeypatch):
    (fake.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(fake.folder))
    with pytest.raises(TrainpaceError):
        LAUNCHER.check()
    with pytest.raises(TrainpaceError):
        LAUNCHER.run(job)
    assert not Path(job.folder).exists()


def test_squeue_ignores_user_environment_defaults(fake, job, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    fake.answers('[ -z "$SQUEUE_PARTITION" ] && ' + leaving(job, row("COMPLETED")))
    assert LAUNCHER.run(job).state == "done"


def jobs_of(tmp_path, number, **more):
    folder = tmp_path / "jobs"
    return [
        Job(
            name=f"t{i}",
            program=("r.py",),
            folder=str(folder),
            result=str(folder / f"{i}.json"),
            **more,
        )
        for i in range(number)
    ]


def test_slurm_options_reach_the_script(job):
    text = Slurm(options=SlurmOptions(partition="gpu", python="py")).text(job)
    assert "#SBATCH --partition=gpu\n" in text
    assert "words=(py rank.py)" in text
