"""Result of a script trial, from event logs as the recorder writes them on a GPU."""

import pytest

from trainpace.run.script import ScriptTrial, _mismatch, _result, _steps
from trainpace.watch import COMMAND_FILE, read_processes, read_recording
from trainpace.watch.inside.event_log import FORWARD, PARTS, TRIALS, EventLogWriter, Step


def recorded(folder, samples=16, notes=()):
    for rank in range(2):
        log = EventLogWriter(
            str(folder / f"process-{rank}-here.trail"),
            {
                "role": "process",
                "pid": rank,
                "host": "here",
                "rank": rank,
                "world_size": 2,
                "cpus": 2,
            },
        )
        parts = [0] * len(PARTS)
        parts[FORWARD] = 10_000_000
        for i in range(20):
            at = i * parts[FORWARD]
            plain = TRIALS.index("plain")
            log.step(
                Step(plain, 1, i, at, at + parts[FORWARD], samples, 3.0 + rank, 0.0, tuple(parts))
            )
        for note in notes:
            log.note(**note)
        log.flush()
    (folder / COMMAND_FILE).write_text('{"command": ["x"], "seconds": 1.0, "exit_code": 0}')
    return read_recording(folder), read_processes(folder)


@pytest.mark.parametrize(("notes", "peak"), [((), None), (({"peak_allocated_gib": 1.5},), 1.5)])
def test_peak_memory_excludes_allocator_reserve(notes, peak, tmp_path):
    recording, processes = recorded(
        tmp_path, notes=({"accelerator": "NVIDIA A100-SXM4-80GB"}, *notes)
    )
    steps = _steps(processes[0])
    result = _result(recording, processes, steps, steps[5:], 0.0, 1.0)
    assert (result.peak_memory_gib, result.reserved_memory_gib) == (peak, 4.0)
    assert result.environment["gpu"] == "NVIDIA A100-SXM4-80GB"


def test_batch_mismatch_prints_all_digits(tmp_path):
    trial = ScriptTrial(command=("x",), cwd=".", steps=9, world_size=2, global_batch=1000)
    said = _mismatch(trial, *recorded(tmp_path, samples=2**19))
    assert "1,048,576" in said
