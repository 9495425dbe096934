"""Two hosts with a slow link between them: gradients of 0.5 MB every step."""

import argparse

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--compress", action="store_true", help="gradients travel in half precision")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(512 * args.steps, 256), torch.randint(10, (512 * args.steps,)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 480), nn.ReLU(), nn.Linear(480, 10)))
if args.compress:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for features, labels in DataLoader(dataset, batch_size=256, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
