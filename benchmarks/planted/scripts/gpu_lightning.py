"""Lightning on a GPU: a recurrent cell that is called for every moment, or the library's kernel; or a callback that waits."""

import argparse
import logging

import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as pl
except ImportError:
    import pytorch_lightning as pl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--cell", choices=["own", "library"], default="own")
args = parser.parse_args()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Recurrent(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.cell, self.library = nn.GRUCell(64, 256), nn.GRU(64, 256, batch_first=True)
        self.head, self.losses = nn.Linear(256, 10), []

    def training_step(self, batch, index):
        series, labels = batch
        if args.cell == "library":
            state = self.library(series)[1][0]
        else:
            state = series.new_zeros(len(series), 256)
            for moment in series.unbind(1):
                state = self.cell(moment, state)
        loss = nn.functional.cross_entropy(self.head(state), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


torch.manual_seed(0)
count = 64 * args.steps
loader = DataLoader(
    TensorDataset(torch.randn(count, 100, 64), torch.randint(10, (count,))), batch_size=64
)
model = Recurrent()
trainer = pl.Trainer(
    max_steps=args.steps,
    accelerator="auto",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader)
report(model.losses)
