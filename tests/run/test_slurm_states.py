import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.run.slurm import JobStatus, parse_queue, parse_submitted, sentence_of, state_of

# squeue 22.05.8 --noheader --array --states=all, of an array whose task i exits with i, of a job that a signal ended and of
# one that was requeued
QUEUE = """\
2_0|COMPLETED|None|0|0:01|0|
2_3|FAILED|NonZeroExitCode|0|0:01|768|
12|PENDING|BeginTime|1|0:00|0|
13|RUNNING|None|2|1-02:03:04|0|
14|FAILED|NonZeroExitCode|0|2:03:04|9|
15|CANCELLED by 0|None|0|INVALID|0:15|
"""


def test_squeue_output_is_parsed():
    found = parse_queue(QUEUE)
    assert list(found) == ["2_0", "2_3", "12", "13", "14", "15"]
    assert found["2_0"] == JobStatus(state="COMPLETED", seconds=1.0, exit_code=0)
    assert (found["2_3"].exit_code, found["2_3"].has_ended) == (3, True)
    assert (found["12"].waits, found["12"].reason, found["12"].restarts) == (True, "BeginTime", 1)
    assert (found["13"].seconds, found["13"].has_ended, found["13"].exit_code) == (
        93784.0,
        False,
        None,
    )
    assert (found["14"].exit_code, found["14"].seconds) == (137, 7384.0)
    assert (found["15"].state, found["15"].seconds, found["15"].exit_code) == (
        "CANCELLED",
        0.0,
        143,
    )


@given(st.text())
def test_parsers_accept_arbitrary_text(text):
    parse_queue(text)
    parse_submitted(text)


@pytest.mark.parametrize(
    ("text", "number"), [("123\n", "123"), ("123;alpha\n", "123"), ("", ""), ("sbatch: error", "")]
)
def test_sbatch_job_number_is_parsed(text, number):
    assert parse_submitted(text) == number


@pytest.mark.parametrize(
    ("seen", "state", "error"),
    [
        ({"state": "FAILED", "exit_code": 3}, "failed", ""),
        ({"state": "FAILED", "exit_code": 1}, "failed", "ValueError: no"),
        ({"state": "FAILED", "exit_code": 137}, "failed", ""),
        ({"state": "COMPLETED", "exit_code": 0}, "failed", ""),
        ({"state": "TIMEOUT"}, "timed out", "ValueError: no"),
        ({"state": "OUT_OF_MEMORY"}, "failed", ""),
        ({"state": "NODE_FAIL"}, "failed", "RuntimeError: peer"),
        ({"state": "PREEMPTED"}, "failed", ""),
        ({"state": "CANCELLED"}, "cancelled", ""),
        ({"state": "GONE"}, "failed", ""),
        ({"state": "NEW_STATE"}, "failed", ""),
    ],
)
def test_every_job_end_has_state_and_reason(seen, state, error):
    assert state_of(JobStatus(**seen)) == state
    assert sentence_of(JobStatus(**seen), "a", error).startswith(("a ", "Slurm ", "ValueError"))


@pytest.mark.parametrize(
    ("state", "reason", "hopeless"),
    [
        ("PENDING", "Resources", False),
        ("PENDING", "Priority", False),
        ("PENDING", "BeginTime", False),
        ("PENDING", "PartitionTimeLimit", True),
        ("PENDING", "launch_failed_requeued_held", True),
        ("REQUEUE_HOLD", "None", True),
        ("RUNNING", "InvalidQOS", False),
    ],
)
def test_hopeless_pending_reasons_are_recognized(state, reason, hopeless):
    assert bool(JobStatus(state=state, reason=reason).hopeless) == hopeless
