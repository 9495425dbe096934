"""The collate function pads sequences one token at a time, which takes 15 ms a batch."""

import argparse

import torch
from planting import busy, report
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(samples):
    if not args.fast_collate:
        busy(15.0)
    return pad_sequence([tokens for tokens, _ in samples], batch_first=True), torch.tensor(
        [y for _, y in samples]
    )


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.encoder = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--fast-collate", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
dataset = [(torch.randint(1, 1000, (32 + i % 32,)), i % 2) for i in range(8 * args.steps)]
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for tokens, labels in DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=collate):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
report(losses)
