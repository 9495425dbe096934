"""One rank a node, under srun; one of them is slow in its forward pass, in its data, or for longer sequences. What a forward pass
takes grows with its tokens, by a known time each."""

import argparse
import os

import torch
import torch.distributed as dist
from planting import report, wait
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

TOKEN_MS = 0.02
BATCH, TOKENS, LONG = 8, 64, 192
"""Samples of a batch, tokens of a sample, and tokens of a longer one."""


class Documents(Dataset):
    def __init__(self, samples, tokens, read_ms):
        self.samples, self.tokens, self.read_ms = samples, tokens, read_ms

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        if self.read_ms:
            wait(self.read_ms)
        return torch.full((self.tokens,), i % 997), i % 2


class Classifier(nn.Module):
    def __init__(self, slow_ms):
        super().__init__()
        self.slow_ms = slow_ms
        self.embedding = nn.Embedding(1000, 128)
        self.body = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    def forward(self, tokens):
        wait(TOKEN_MS * tokens.numel() + self.slow_ms)
        return self.body(self.embedding(tokens).mean(1))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--rank", type=int, default=1, help="the rank with the fault")
parser.add_argument(
    "--forward-ms", type=float, default=0.0, help="by which its forward pass is slower"
)
parser.add_argument("--read-ms", type=float, default=0.0, help="which it takes to read a sample")
parser.add_argument("--long", action="store_true", help="its sequences are longer")
args = parser.parse_args()

os.environ.setdefault("RANK", os.environ.get("SLURM_PROCID", "0"))
os.environ.setdefault("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))
dist.init_process_group("gloo")
at_fault = dist.get_rank() == args.rank
torch.manual_seed(0)
dataset = Documents(
    BATCH * args.steps,
    LONG if args.long and at_fault else TOKENS,
    args.read_ms if at_fault else 0.0,
)
model = DistributedDataParallel(Classifier(args.forward_ms if at_fault else 0.0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for tokens, labels in DataLoader(dataset, batch_size=BATCH):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
