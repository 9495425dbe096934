"""Hugging Face Trainer; most of the parameters are an embedding, and AdamW over all of them outweighs the model."""

import argparse
import tempfile

import torch
from planting import report
from torch import nn
from transformers import Trainer, TrainingArguments


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30_000, 128), nn.Linear(128, 8)
        self.losses = []

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids).mean(1))
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=70)
parser.add_argument("--optim", default="adamw_torch")
args = parser.parse_args()

torch.manual_seed(0)
dataset = [
    {"input_ids": torch.randint(30_000, (32,)), "labels": i % 8} for i in range(8 * args.steps)
]
model = Tagger()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        optim=args.optim,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
report(model.losses)
