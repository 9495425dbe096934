"""An embedding of 20 million parameters, a batch of 4: the gradient's all-reduce outweighs the computing."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=90)
parser.add_argument(
    "--average-every",
    type=int,
    default=0,
    help="local SGD: average parameters now and then instead",
)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(
    torch.randint(40_000, (8 * args.steps, 32)), torch.randint(10, (8 * args.steps,))
)
model = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(40_000, 512), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
averager = (
    PeriodicModelAverager(period=args.average_every, warmup_steps=0) if args.average_every else None
)
losses = []
for items, labels in DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    with model.no_sync() if averager else contextlib.nullcontext():
        loss = nn.functional.cross_entropy(model(items), labels)
        loss.backward()
    optimizer.step()
    if averager:
        averager.average_parameters(model.parameters())
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
