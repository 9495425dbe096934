"""A script keeps its exit code and output under the recorder."""

import re
import subprocess
import sys

import pytest

from trainpace.watch import read_recording, watch

STEPS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
ENDINGS = {
    "the end": "print('done')",
    **{
        f"exit code {n}": f"import sys; print('x'); sys.exit({n})"
        for n in (0, 1, 2, 7, 127, 128, 200, 255, 256, -1)
    },
    "text": "import sys; sys.exit('this text goes to stderr')",
    "None": "import sys; sys.exit(None)",
    "no number": "import sys; sys.exit([1])",
    "SystemExit": "raise SystemExit(4)",
    "an exception": "raise ValueError('no')",
    "an exception without text": "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
    "GeneratorExit": "raise GeneratorExit",
    "MemoryError": "raise MemoryError",
    "too deep": "def f(): f()\nf()",
    "no syntax": "def f(:",
    "no module": "import this_is_not_there",
    "at exit": "import atexit; atexit.register(print, 'last words')",
    "at exit, raised": "import atexit\n@atexit.register\ndef f(): raise ValueError",
    "os._exit": "import os; print('a', flush=True); os._exit(9)",
    "os._exit, output lost": "import os; print('not flushed'); os._exit(0)",
    "a thread raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "a thread exits": "import threading, sys\nt = threading.Thread(target=sys.exit, args=(5,)); t.start(); t.join()",
    "a thread, os._exit": "import threading, os\nt = threading.Thread(target=os._exit, args=(6,)); t.start(); t.join()",
    "a thread outlives it": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()",
    "a daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('b')",
    "exec": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.exit(11)'])",
    "a child": "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, '-c', 'raise SystemExit(12)']))",
    "a fork": "import os\np = os.fork()\nif not p: os._exit(13)\nos._exit(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))",
    "SIGTERM, handled": "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(14))\nos.kill(os.getpid(), 15)",
    **{
        f"signal {n}": f"import os; print('c', flush=True); os.kill(os.getpid(), {n})"
        for n in (1, 6, 9, 10, 11, 15)
    },
    "stdout closed": "import os; os.close(1)",
    "stdout and stderr closed": "import sys; sys.stdout.close(); sys.stderr.close(); sys.exit(3)",
    "trained": STEPS,
    "trained, exit code": STEPS + "raise SystemExit(21)",
    "trained, exception": STEPS + "1 / 0",
    "trained, os._exit": STEPS + "import os; os._exit(22)",
    "trained, killed": STEPS + "import os; os.kill(os.getpid(), 9)",
}


def without_addresses(text):
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trials",
    [None, {"block_steps": 8, "rounds": 4, "warm_up_steps": 10, "limit_s": 30.0, "without": []}],
    ids=["watch", "diagnose"],
)
@pytest.mark.parametrize("ending", ENDINGS)
def test_recorder_keeps_exit_code_and_output_of_the_script(ending, trials, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[ending])
    command = [sys.executable, str(script)]
    alone = subprocess.run(command, capture_output=True, text=True)
    with open(tmp_path / "output", "w") as output:
        code = watch(command, tmp_path / "recording", trials, output.fileno())
    assert code == (alone.returncode if alone.returncode >= 0 else 128 - alone.returncode)
    assert (tmp_path / "output").read_text() == alone.stdout
    assert without_addresses(capfd.readouterr().err) == without_addresses(alone.stderr)
    recording = read_recording(tmp_path / "recording")
    assert recording.exit_code in (code, alone.returncode)
    if ending in (
        "trained",
        "trained, exit code",
        "trained, exception",
    ):  # an abruptly ended process keeps only records already written
        assert recording.ranks[0].steps >= 5
