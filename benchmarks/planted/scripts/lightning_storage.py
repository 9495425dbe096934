"""Lightning, reading from remote storage (1.5 ms a sample) with no workers."""

import argparse

import lightning
import torch
from planting import report, wait
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        wait(1.5)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(512, generator=generator), index % 10


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.model(features), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        model,
        DataLoader(Remote(16 * args.steps), batch_size=16, shuffle=True, num_workers=args.workers),
    )
    report(model.losses)
