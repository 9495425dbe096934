"""Send Ctrl-C to this process as soon as a condition holds."""

import os
import signal
import threading
import time

import pytest

# Ctrl-C may arrive between the opening of a file and the `with` that closes it. The file is then closed with a warning.
may_leave_a_file_open = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning"
)


def is_written(path):
    return path.exists() and path.stat().st_size > 0


def interrupt_when(has_happened, within_s=60.0):
    def interrupt():
        end = time.monotonic() + within_s
        while not has_happened() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
