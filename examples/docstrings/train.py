"""A BERT that learns from which package a docstring of Python's standard library comes, by
transformers' Trainer, and with the default of transformers' own run_glue.py: every text is padded
to the longest that is allowed. The model is small and begins at random, since no weights are
downloaded.

    python train.py settings.json
    torchrun --nproc-per-node 2 train.py settings.json
    trainpace run ladder.toml
"""

import ast
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

PACKAGES = (
    "asyncio",
    "email",
    "tkinter",
    "unittest",
    "xml",
    "multiprocessing",
    "http",
    "importlib",
)
VOCABULARY, LONGEST = 4000, 128


@dataclass
class DataArguments:
    pad_to_max_length: bool = True
    """Pad every text to LONGEST tokens; else to the longest of its batch."""


def docstrings() -> list[tuple[str, int]]:
    """(text, number of its package), in the order of their files."""
    found = []
    for label, package in enumerate(PACKAGES):
        for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8", "ignore"))):
                kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    found.append((text, label))
    return found


def tokenizer_of(texts: list[str]) -> BertTokenizerFast:
    """BERT's own way of dividing words, learnt from the texts."""
    return BertTokenizerFast().train_new_from_iterator(texts, VOCABULARY, show_progress=False)


class Texts(Dataset):
    def __init__(self, padded: bool) -> None:
        pairs = docstrings()
        self.tokenizer = tokenizer_of([text for text, _ in pairs])
        options = {
            "truncation": True,
            "max_length": LONGEST,
            "padding": "max_length" if padded else False,
        }
        self.encoded = self.tokenizer([text for text, _ in pairs], **options)
        self.labels = [label for _, label in pairs]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {name: column[index] for name, column in self.encoded.items()} | {
            "labels": self.labels[index]
        }


def model_of() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            num_labels=len(PACKAGES),
        )
    )


def main() -> None:
    settings, data = HfArgumentParser((TrainingArguments, DataArguments)).parse_json_file(
        sys.argv[1]
    )
    set_seed(settings.seed)
    texts = Texts(data.pad_to_max_length)
    trainer = Trainer(
        model=model_of(),
        args=settings,
        train_dataset=texts,
        data_collator=DataCollatorWithPadding(texts.tokenizer),
    )
    torch.manual_seed(settings.seed)
    trainer.train()


if __name__ == "__main__":
    main()
