"""Train with Lightning under each setting in argv[1] and print one line per setting.

A line lists, for every batch, the counts that the callback predicted and the actual ones.
"""

import json
import sys
import tempfile

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from trainpace.callbacks.lightning import TimeLeft


class Net(LightningModule):
    def __init__(self, optimizers):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.automatic_optimization = optimizers == 1
        self.wanted = optimizers

    def training_step(self, batch, _):
        loss = self.net(batch[0]).mean()
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                optimizer.step()
        return loss

    def validation_step(self, batch, _):
        self.net(batch[0])

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.wanted)]


class Count(Callback):
    def __init__(self, callback):
        self.callback, self.said = callback, []
        self.batches = self.evaluations = self.epochs = 0

    def on_train_batch_end(self, *args, **kwargs):
        self.batches += 1
        counts = self.callback._counts()
        left = counts and (counts.batches, counts.evaluations, counts.epochs)
        self.said.append({"now": (self.batches, self.evaluations, self.epochs), "left": left})

    def on_validation_end(self, trainer, *args, **kwargs):
        self.evaluations += not trainer.sanity_checking

    def on_train_epoch_start(self, *args, **kwargs):
        self.epochs += 1


def train(settings):
    resume, samples = settings.pop("resume", None), settings.pop("samples", 20)
    optimizers, validates = settings.pop("optimizers", 1), settings.pop("validates", True)
    with tempfile.TemporaryDirectory() as folder:
        train = DataLoader(TensorDataset(torch.ones(samples, 4)), 1)
        validation = DataLoader(TensorDataset(torch.ones(3, 4)), 1) if validates else None

        def trainer(callbacks, **more):
            return Trainer(
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                callbacks=callbacks,
                **{**settings, **more},
            )

        path = None
        if resume:
            keep = ModelCheckpoint(dirpath=folder, filename="kept", every_n_train_steps=resume)
            trainer([keep], max_steps=resume).fit(Net(optimizers), train, validation)
            path = f"{folder}/kept.ckpt"
        told = []
        callback = TimeLeft(no_journal=True, tell=told.append, every_s=0.0)
        count = Count(callback)
        trainer([callback, count]).fit(Net(optimizers), train, validation, ckpt_path=path)
    print(
        json.dumps(
            {
                "said": count.said,
                "end": (count.batches, count.evaluations, count.epochs),
                "told": len(told),
                "off": callback.off,
            }
        )
    )


for one in json.loads(sys.argv[1]):
    train(one)
