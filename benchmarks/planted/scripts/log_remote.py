"""Every step's loss is logged, synced to disk, and posted to a tracking server that answers in 10 ms."""

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path

import torch
from planting import report, wait
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TrackingServer(logging.Handler):
    def emit(self, record):
        wait(10.0)


class SyncedFile(logging.FileHandler):
    def emit(self, record):
        super().emit(record)
        os.fsync(self.stream.fileno())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--log-every", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32 * args.steps, 512), torch.randint(10, (32 * args.steps,)))
model = nn.Sequential(
    nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
with tempfile.TemporaryDirectory() as folder:
    log = logging.getLogger("metrics")
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in (TrackingServer(), SyncedFile(Path(folder) / "metrics.jsonl")):
        log.addHandler(handler)
    for step, (features, labels) in enumerate(DataLoader(dataset, batch_size=32, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % args.log_every == 0:
            log.info(json.dumps({"step": step, "loss": loss.item()}))
report(losses)
