"""Sequences sorted by length and dealt out in contiguous halves: one rank has only long ones, the other waits for it."""

import argparse

import torch
import torch.distributed as dist
from planting import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.encoder = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument(
    "--interleave", action="store_true", help="deal the sorted sequences out in turns"
)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
length = ranks * 8 * args.steps
dataset = [
    (torch.randint(1000, (16 + int(600 * (i / length) ** 3),)), i % 2) for i in range(length)
]
mine = (
    range(rank, length, ranks)
    if args.interleave
    else range(rank * length // ranks, (rank + 1) * length // ranks)
)


def collate(samples):
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return tokens, torch.tensor([label for _, label in samples])


model = DistributedDataParallel(Classifier())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for tokens, labels in DataLoader(Subset(dataset, mine), batch_size=8, collate_fn=collate):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
dist.destroy_process_group()
