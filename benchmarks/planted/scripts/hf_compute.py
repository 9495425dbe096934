"""Nothing is wrong: Hugging Face Trainer on a small BERT, with tokens in memory."""

import argparse
import tempfile

import torch
from planting import report
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=500,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
        )
        self.bert, self.losses = BertForSequenceClassification(config), []

    def forward(self, input_ids, labels):
        output = self.bert(input_ids=input_ids, labels=labels)
        self.losses.append(output.loss.detach())
        return output


torch.manual_seed(0)
dataset = [{"input_ids": torch.randint(500, (64,)), "labels": i % 2} for i in range(8 * args.steps)]
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
    )
    Trainer(model=model, args=arguments, train_dataset=dataset).train()
report(model.losses)
