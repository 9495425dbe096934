"""Hugging Face Trainer that evaluates on the whole validation set every 10 steps."""

import argparse
import tempfile

import torch
from planting import report
from torch import nn
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
        self.losses = []

    def forward(self, features, labels):
        logits = self.net(features)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--eval-steps", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
training = [{"features": torch.randn(512), "labels": i % 10} for i in range(16 * args.steps)]
validation = [{"features": torch.randn(512), "labels": i % 10} for i in range(1600)]
model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=training, eval_dataset=validation).train()
report(model.losses)
