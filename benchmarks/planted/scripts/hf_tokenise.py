"""Hugging Face Trainer whose collator tokenises the same documents again in every step."""

import argparse
import inspect
import tempfile
import textwrap

import torch
from planting import report
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(2000, 256)
        self.head = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2)
        )
        self.losses = []

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=70)
parser.add_argument("--pretokenise", action="store_true", help="tokenise once, before training")
args = parser.parse_args()

torch.manual_seed(0)
source = (
    inspect.getsource(argparse)
    + inspect.getsource(textwrap)
    + inspect.getsource(inspect)
    + inspect.getsource(tempfile)
)
documents = [source[start : start + 6000] for start in range(0, len(source) - 6000, 6000)]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=2000, show_progress=False))


def tokenise(document):
    return tokenizer.encode(document).ids[:512]


tokens = [tokenise(document) for document in documents] if args.pretokenise else None
dataset = [{"document": i % len(documents), "label": i % 2} for i in range(8 * args.steps)]


def collate(samples):
    ids = [tokens[s["document"]] if tokens else tokenise(documents[s["document"]]) for s in samples]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([s["label"] for s in samples])}


model = Classifier()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=20,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(model=model, args=arguments, train_dataset=dataset, data_collator=collate).train()
report(model.losses)
