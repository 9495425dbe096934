"""Tracing a script's model at the end takes a bounded time, and leaves the script's own alarms as they were."""

import signal
import sys
import threading
import time

import pytest

from trainpace.watch import read_recording, watch
from trainpace.watch.inside.capture import at_most

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms here")


def test_what_takes_longer_is_ended_and_alarms_go_on():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append("mine"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 100.0)
        with pytest.raises(TimeoutError, match=r"longer than 0\.05 s"), at_most(0.05):
            time.sleep(5)
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
        with at_most(5.0):
            pass
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.1)
        assert rung == ["mine"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_on_another_thread_nothing_is_limited():
    done = []

    def work():
        with at_most(0.01):
            time.sleep(0.05)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


@pytest.mark.slow
def test_a_recurrent_network_of_many_calls_does_not_keep_the_user_waiting(tmp_path):
    """The script's losses and exit code are there, and no workload."""
    path = tmp_path / "train.py"
    path.write_text("""
import torch
cell = torch.nn.LSTMCell(1, 8)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = cell
    def forward(self, x):
        h = c = torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t : t + 1], (h, c))
        return h.square().mean()
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    loss = net(torch.rand(2, 6000))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""")
    assert watch([sys.executable, str(path)], tmp_path / "recording") == 0
    assert read_recording(tmp_path / "recording").ranks[0].steps == 3
    assert not (tmp_path / "recording" / "workload.json").exists()
