"""Trials of an unchanged script: it runs for a number of steps, then ends, and its checkpoints stay."""

import sys
import textwrap

import pytest

from interrupting import interrupt_when, may_leave_a_file_open
from trainpace.run.script import ScriptTrial, run_script
from trainpace.run.trial import FailedTrial, TrialResult

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(40, 10))
    if sys.argv[2:] == ["fail"]:
        raise ValueError("not today")
    for epoch in range(int(sys.argv[2]) if sys.argv[2:] else 10_000):
        for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), sys.argv[1])
"""


def run(tmp_path, *arguments):
    script, checkpoint = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(textwrap.dedent(SCRIPT))
    checkpoint.write_text("the user's own")
    command = (sys.executable, str(script), str(checkpoint), *arguments)
    result = run_script(
        ScriptTrial(command=command, cwd=str(tmp_path), steps=20), tmp_path / "trial", timeout_s=100
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.pt", "train.py", "trial"]
    assert checkpoint.read_text() == "the user's own"
    return result


def test_script_trial_runs_requested_steps(tmp_path):
    result = run(tmp_path)
    assert isinstance(result, TrialResult), result.reason
    assert len(result.step_ms) == len(result.data_wait_ms) == 20
    assert result.samples_per_second == pytest.approx(4e3 / result.step_time_ms)
    assert len(result.losses) == 5 + 2 + 20
    assert 0 < result.losses[-1] < result.losses[0]
    assert 0 < result.start_up_s < 100
    assert result.environment["cpu"]
    assert not result.uneven
    assert (result.peak_memory_gib, result.reserved_memory_gib) == (
        None,
        None,
    )  # of the GPU's allocator alone


def test_command_without_python_is_a_failed_trial(tmp_path):
    found = run_script(
        ScriptTrial(command=("true",), cwd=str(tmp_path), steps=10), tmp_path / "trial"
    )
    assert isinstance(found, FailedTrial)
    assert "No Python process of this command imported torch" in found.reason


@pytest.mark.parametrize(
    ("argument", "says"), [("fail", "not today"), ("0", "no training step was seen")]
)
def test_script_without_steps_fails_with_reason(argument, says, tmp_path):
    result = run(tmp_path, argument)
    assert isinstance(result, FailedTrial)
    assert says in result.reason


def test_short_script_reports_available_steps(tmp_path):
    result = run(tmp_path, "1")
    assert isinstance(result, TrialResult), result.reason
    assert len(result.step_ms) == 10 - 5 - 2  # after the warm-up, and two that settle


@may_leave_a_file_open
def test_ctrl_c_ends_script_trial_without_leftovers(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = (sys.executable, "train.py", "model.pt")

    interrupt_when(lambda: list(tmp_path.glob("model.pt.*")), within_s=200)
    with pytest.raises(KeyboardInterrupt):
        run_script(
            ScriptTrial(command=command, cwd=str(tmp_path), steps=10_000_000),
            tmp_path / "trial",
            timeout_s=300,
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py", "trial"]


def test_script_writing_outside_its_folder_fails_with_path(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\n"
        + textwrap.dedent(SCRIPT).replace(
            "optimizer.step()", "optimizer.step()\n        open('progress.json', 'w')"
        )
    )
    found = run_script(
        ScriptTrial(command=(sys.executable, "train.py", "model.pt"), cwd=str(tmp_path), steps=10),
        tmp_path / "trial",
    )
    assert isinstance(found, FailedTrial)
    assert "may write only into its own folder" in found.reason
    assert "progress.json" in found.reason
    assert not (tmp_path / "progress.json").exists()


def test_uneven_batches_use_mean_step_time(tmp_path):
    """One batch in ten is eight times as long, which the median would miss."""
    script = tmp_path / "train.py"
    script.write_text("""
import time, torch
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10_000):
    length = 8 if step % 10 == 0 else 1
    loss = model(torch.randn(4, length, 10)).square().mean()
    time.sleep(0.01 * length)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""")
    trial = ScriptTrial(command=(sys.executable, str(script)), cwd=str(tmp_path), steps=20)
    result = run_script(trial, tmp_path / "trial", timeout_s=100)
    assert isinstance(result, TrialResult), result.reason
    assert result.uneven
    assert result.step_time_ms == pytest.approx(sum(result.step_ms) / 20)
    assert sorted(result.step_ms)[10] < 0.8 * result.step_time_ms
