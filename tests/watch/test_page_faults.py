"""Page faults are counted as the system counts them, and timed where they happen."""

import mmap
import os
import subprocess
import sys

import pytest

from trainpace.diagnose.memory_advice import VARIABLES
from trainpace.watch import read_recording
from trainpace.watch.inside import page_faults

pytestmark = pytest.mark.skipif(page_faults.count() is None, reason="this C library is not glibc")


def test_pages_that_are_written_to_are_counted():
    pages = 2000
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        before = page_faults.count()
        memory[:: mmap.PAGESIZE] = bytes(pages)
        new = page_faults.count() - before
        again = page_faults.count()
        memory[:: mmap.PAGESIZE] = bytes(pages)
        assert page_faults.count() - again < 100
    assert pages <= new < pages + 100


def test_one_takes_longer_than_writing_to_a_page_that_is_there():
    """Clearing 4 KiB at the rate of memory alone takes about 100 ns."""
    assert 50 < page_faults.cost_ns() < 1e6


def test_nothing_is_told_of_another_c_library(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda _: None)
    assert page_faults.count() is None
    assert page_faults.cost_ns() is None


LARGE_TENSORS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
class Rows(torch.utils.data.Dataset):
    rows = torch.rand(8, 600_000, 16)
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        return self.rows[i]
for epoch in range(40):
    for x in torch.utils.data.DataLoader(Rows(), batch_size=None):
        model(x).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_variables_that_are_advised_keep_the_memory(tmp_path):
    """Tensors of 38 MB are mapped and given back one by one; under the variables of the advice they are not."""
    faults = []
    for variables in ({}, VARIABLES):
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        folder, script = tmp_path / f"r{len(faults)}", tmp_path / "train.py"
        script.write_text(LARGE_TENSORS)
        command = (sys.executable, str(script))
        wanted = ["--budget", "20s", "--output", str(folder), "--", *command]
        subprocess.run(
            [sys.executable, "-m", "trainpace", "diagnose", *wanted], env=environment, capture_output=True, check=True
        )
        (rank,) = read_recording(folder).ranks
        faults.append(rank.page_faults)
    assert faults[0] > 10_000
    assert faults[1] < 0.3 * faults[0]  # what a growing heap takes anew comes on top
