"""Lightning; a recurrent cell written out in Python, with 16 hidden units over 100 moments."""

import argparse

import lightning
import torch
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class WrittenOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(8 + 16, 4 * 16)

    def forward(self, series):
        hidden = cell = series.new_zeros(len(series), 16)
        for moment in series.unbind(1):
            i, f, o, g = self.gates(torch.cat([moment, hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden


class Library(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, series):
        return self.lstm(series)[0][:, -1]


class Forecaster(lightning.LightningModule):
    def __init__(self, cell):
        super().__init__()
        self.model = nn.Sequential(cell, nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        series, target = batch
        loss = nn.functional.mse_loss(self.model(series), target)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cell", choices=["written-out", "library"], default="written-out")
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    model = Forecaster(WrittenOut() if args.cell == "written-out" else Library())
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    dataset = TensorDataset(torch.randn(4 * args.steps, 100, 8), torch.randn(4 * args.steps, 1))
    trainer.fit(model, DataLoader(dataset, batch_size=4, shuffle=True))
    report(model.losses)
