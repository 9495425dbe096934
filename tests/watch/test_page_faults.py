"""Tests of counting and timing page faults."""

import contextlib
import mmap
import os
import subprocess
import sys

import pytest

from trainpace.diagnose import diagnose
from trainpace.diagnose.advice import VARIABLES
from trainpace.watch import read_recording
from trainpace.watch.inside import observers

pytestmark = pytest.mark.skipif(
    observers.page_fault_ns() is None, reason="page faults are not counted here"
)


def test_page_faults_count_first_writes():
    pages = 2000
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        before = observers.page_faults()
        memory[:: mmap.PAGESIZE] = bytes(pages)
        new = observers.page_faults() - before
        again = observers.page_faults()
        memory[:: mmap.PAGESIZE] = bytes(pages)
        assert observers.page_faults() - again < 100
    assert pages <= new < pages + 100


def test_page_fault_time_is_plausible():
    """Clearing 4 KiB at full memory bandwidth alone takes about 100 ns."""
    assert 50 < observers.page_fault_ns() < 1e6


def test_page_faults_are_none_without_glibc(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda _: None)
    assert observers.page_faults() is None
    assert observers.page_fault_ns() is None


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
def test_diagnose_advises_keeping_freed_memory_until_it_is_kept(tmp_path):
    """Each tensor of 38 MB is mapped and unmapped separately."""
    told = []
    for variables in ({}, VARIABLES):
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        folder, script = tmp_path / f"r{len(told)}", tmp_path / "train.py"
        script.write_text(LARGE_TENSORS)
        wanted = ["--budget", "20s", "--output", str(folder), "--", sys.executable, str(script)]
        subprocess.run(
            [sys.executable, "-m", "trainpace", "diagnose", *wanted],
            env=environment,
            capture_output=True,
            check=True,
        )
        recording = read_recording(folder)
        told.append([a.title for a in diagnose(recording).advice if "memory" in a.title])
        assert (recording.ranks[0].page_faults > 10_000) == (not variables)
    assert told == [["keep freed memory in the process"], []]
