"""Hugging Face Trainer and BERT-base on a GPU; texts are made into tokens in every step, or beforehand."""

import argparse
import tempfile

import torch
from planting import report
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
parser.add_argument(
    "--tokenise", action="store_true", help="split and look words up when a sample is asked for"
)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--optim", default="adamw_torch_fused")
args = parser.parse_args()
TOKENS = 256


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(vocab_size=30522, num_hidden_layers=args.layers)
        self.bert, self.losses = BertForSequenceClassification(config), []

    def forward(self, input_ids, labels):
        output = self.bert(input_ids=input_ids, labels=labels)
        self.losses.append(output.loss.detach())
        return output


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.known = {f"word{i}": i for i in range(30000)}
        rows = torch.randint(30000, (64, TOKENS), generator=generator).tolist()
        self.texts = [" ".join(f"word{i}" for i in row) for row in rows]
        self.tokens = torch.tensor(rows)

    def __len__(self):
        return args.batch * args.steps

    def __getitem__(self, index):
        if not args.tokenise:
            return {"input_ids": self.tokens[index % 64], "labels": index % 2}
        found = []
        for word in self.texts[index % 64].split():
            pieces = [word[:end] for end in range(len(word), 0, -1)]
            found.append(next(self.known[piece] for piece in pieces if piece in self.known))
            "".join(sorted(word * 8))  # normalising, as slow tokenisers do
        return {"input_ids": torch.tensor(found), "labels": index % 2}


def main():
    torch.manual_seed(0)
    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            bf16=args.precision == "bf16",
            optim=args.optim,
            dataloader_num_workers=args.workers,
            report_to=[],
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
            torch_compile=args.compile,
        )
        Trainer(model=model, args=arguments, train_dataset=Texts()).train()
    report(model.losses)


if __name__ == "__main__":
    main()
