"""FSDP2 with a small batch: parameters are gathered for the forward pass, freed, and gathered again for the backward."""

import argparse

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument(
    "--keep-gathered", action="store_true", help="do not free parameters after the forward pass"
)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(16 * args.steps, 512), torch.randint(10, (16 * args.steps,)))
blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(3)]
model = nn.Sequential(*blocks, nn.Linear(512, 10))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=not args.keep_gathered)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for features, labels in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
