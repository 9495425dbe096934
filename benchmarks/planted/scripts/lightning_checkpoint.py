"""Lightning's ModelCheckpoint every 5 steps."""

import argparse
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from planting import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = nn.functional.cross_entropy(self.model(features), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    dataset = TensorDataset(
        torch.randn(64 * args.steps, 512), torch.randint(10, (64 * args.steps,))
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=args.steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=args.save_every)],
        )
        trainer.fit(model, DataLoader(dataset, batch_size=64, shuffle=True))
    report(model.losses)
