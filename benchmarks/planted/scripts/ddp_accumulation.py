"""Accumulation over 4 micro-batches that synchronises gradients after each, where the last would do."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument(
    "--no-sync", action="store_true", help="synchronise with the last micro-batch only"
)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
accumulate = 4
length = 2 * 8 * accumulate * args.steps
dataset = TensorDataset(torch.randn(length, 512), torch.randint(10, (length,)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for i, (features, labels) in enumerate(
    DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
):
    last = (i + 1) % accumulate == 0
    with contextlib.nullcontext() if last or not args.no_sync else model.no_sync():
        loss = nn.functional.cross_entropy(model(features), labels) / accumulate
        loss.backward()
    losses.append(loss.detach())
    if last:
        optimizer.step()
        optimizer.zero_grad()
report(losses)
dist.destroy_process_group()
