"""``python -m trainpace.cli.suite_part REQUEST.json RESULT.json``: one model of a suite, measured where this runs.

It keeps its probes in a journal of its own beside the result, so that one that was requeued or cancelled goes on where it
was; the result is that journal's export, written whole as its last act. What went wrong is one sentence beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from trainpace.cli.machine import device_of
from trainpace.cli.measuring import measure_item, sparing_the_machine
from trainpace.errors import TrainpaceError
from trainpace.journal import Journal, export
from trainpace.launch import failure_file
from trainpace.machine import detect
from trainpace.measure import SuiteItem
from trainpace.records import write_whole


def main() -> int:
    """0 where the model was measured."""
    request, result = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    item = msgspec.convert(request["item"], SuiteItem)
    try:
        machine = detect()
        options: dict[str, Any] = sparing_the_machine(request["options"] | {"command": request["command"]}, machine)
        with Journal.open(f"{result}.db") as journal:
            measure_item(item, request["batches"], device_of(options["device"], machine), journal, options)
            export(Path(result), (*journal.sweeps(), *journal.every()))
    except TrainpaceError as error:
        write_whole(failure_file(result), str(error))
        Path(f"{result}.db").unlink(missing_ok=True)  # what failed throughout is tried anew by a later call
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
