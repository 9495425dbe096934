"""``python -m trainpace.verbs.suite_task REQUEST.json RESULT.json``: one model of a suite, measured where this runs.

It stores its probes in a journal of its own beside the result, so that one that was requeued or cancelled goes on where it
was; the result is that journal's export, written whole as its last act. What went wrong is one sentence beside it.
"""

import os
import sys
from pathlib import Path

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.journal import Journal, export
from trainpace.launch import failure_file
from trainpace.records import write_whole
from trainpace.verbs.measure import MeasureRequest, sweep_of, with_memory_limit
from trainpace.verbs.progress import Silent
from trainpace.verbs.this_machine import detected, device_of


class _Log(Silent):
    """Remarks into the task's log."""

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def main() -> int:
    """0 where the model was measured."""
    request, result, log = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MeasureRequest), sys.argv[2], _Log()
    try:
        machine = detected(log)
        request = with_memory_limit(request, machine, log)
        with Journal.open(f"{result}.db") as journal:
            sweep_of(request, device_of(request.device, machine), journal, log)
            export(Path(result), (*journal.sweeps(), *journal.every()))
    except TrainpaceError as error:
        write_whole(failure_file(result), str(error))
        Path(f"{result}.db").unlink(missing_ok=True)  # what failed throughout is tried anew by a later call
        log.note(f"Error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
