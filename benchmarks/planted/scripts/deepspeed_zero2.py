"""DeepSpeed ZeRO-2 with accumulation: gradients are reduced after each of 4 micro-batches, as sharded gradients must be."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--stage", type=int, default=2)
args = parser.parse_args()

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
accumulate = 4
length = 2 * 8 * accumulate * args.steps
dataset = TensorDataset(torch.randn(length, 512), torch.randint(10, (length,)))
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": accumulate,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1000,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=config
)
losses = []
for features, labels in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset)):
    loss = nn.functional.cross_entropy(engine(features), labels)
    engine.backward(loss)
    engine.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
