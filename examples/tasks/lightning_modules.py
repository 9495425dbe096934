"""A LightningModule with its DataLoader, under automatic and under manual optimisation.

trainpace forecast examples/tasks/lightning_modules.py:classifier --gpu T4
trainpace forecast examples/tasks/lightning_modules.py:gan --gpu T4 --batch 16,64
"""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader, TensorDataset

LATENT, PIXELS = 16, 32


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
        ]


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(), nn.Linear(64, PIXELS))
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_generator, of_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), LATENT, device=self.device))
        self.toggle_optimizer(of_discriminator)
        loss = (
            softplus(-self.discriminator(real)).mean()
            + softplus(self.discriminator(fake.detach())).mean()
        )
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.toggle_optimizer(of_generator)
        loss = softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(
            self.discriminator.parameters()
        )


def classifier():
    data = TensorDataset(torch.randn(256, PIXELS), torch.randint(0, 10, (256,)))
    return Classifier(), DataLoader(data, batch_size=64)


def gan():
    return Gan(), DataLoader(TensorDataset(torch.randn(256, PIXELS)), batch_size=64)
