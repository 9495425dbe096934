"""A character-level GPT in the way of nanoGPT, with its defaults for a CPU: 4 layers of 128
channels, a context of 64 characters, 12 sequences a micro-batch and 40 micro-batches a step. The
text is the reference of the Python language, which every Python has.

    python train.py settings.json
    torchrun --nproc-per-node 2 train.py settings.json
    trainpace run ladder.toml

Step k sees the same sequences in whatever way they are divided over micro-batches and ranks.
"""

import contextlib
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

LAYERS, HEADS, CHANNELS, CONTEXT, DROPOUT = 4, 4, 128, 64, 0.2


class DropoutByBytes(nn.Module):
    """Dropout with one random byte for each element.

    torch's own draws a number of 64 bits for each, on one thread of the CPU.
    """

    kept = round(256 * (1 - DROPOUT))
    """Of 256:

    205 stand for 0.8, with the scale that belongs to them (rounded to 1.25 in bf16, which is 0.1 %
    more).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        numbers = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        # the comparison writes ones and zeros over the bytes: torch converts those in an eighth of
        # the time of bools
        mask = numbers.view(torch.uint8)[: x.numel()].view(x.shape).lt_(self.kept)
        return x * (mask.to(x.dtype) * (256 / self.kept))


class Attention(nn.Module):
    """Causal attention of (samples, heads, length, channels), with dropout by bytes.

    torch's own draws its masks by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = DropoutByBytes()
        self.later = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        length, channels = queries.shape[-2:]
        scores = queries * channels**-0.5 @ keys.transpose(-1, -2)
        scores = scores + self.later[:length, :length].to(scores.dtype)
        return self.dropout(torch.softmax(scores, -1, dtype=scores.dtype)) @ values


class Block(nn.Module):
    def __init__(self, by_bytes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS, bias=False) for _ in range(2))
        self.to_heads = nn.Linear(CHANNELS, 3 * CHANNELS, bias=False)
        self.from_heads = nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.wide, self.narrow = (
            nn.Linear(CHANNELS, 4 * CHANNELS, bias=False),
            nn.Linear(4 * CHANNELS, CHANNELS, bias=False),
        )
        self.dropout = DropoutByBytes() if by_bytes else nn.Dropout(DROPOUT)
        self.attention = Attention() if by_bytes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        heads = self.to_heads(self.norms[0](x)).view(samples, length, 3, HEADS, CHANNELS // HEADS)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        if self.attention is not None:
            mixed = self.attention(queries, keys, values)
        else:
            dropped = DROPOUT if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, dropout_p=dropped, is_causal=True
            )
        x = x + self.dropout(
            self.from_heads(mixed.transpose(1, 2).reshape(samples, length, CHANNELS))
        )
        return x + self.dropout(self.narrow(functional.gelu(self.wide(self.norms[1](x)))))


class GPT(nn.Module):
    def __init__(self, characters: int, by_bytes: bool = False) -> None:
        super().__init__()
        self.characters, self.places = (
            nn.Embedding(characters, CHANNELS),
            nn.Embedding(CONTEXT, CHANNELS),
        )
        self.dropout = DropoutByBytes() if by_bytes else nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(by_bytes) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(CHANNELS, bias=False)
        self.head = nn.Linear(CHANNELS, characters, bias=False)
        self.head.weight = self.characters.weight
        self.apply(self._begin)

    @staticmethod
    def _begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(
            self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        )
        return self.head(self.norm(self.blocks(hidden)))


class Loss(nn.Module):
    def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def text() -> tuple[torch.Tensor, int]:
    """The numbers of all characters of the text, and how many different ones there are."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: i for i, character in enumerate(sorted(set(whole)))}
    return torch.tensor([numbers[character] for character in whole]), len(numbers)


class Sequences(torch.utils.data.Dataset):
    """(CONTEXT characters, the next one of each) at every place of the text."""

    def __init__(self) -> None:
        self.text, self.characters = text()

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.text[place : place + CONTEXT + 1]
        return piece[:-1], piece[1:]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)


def task():
    """(model, loss, optimizer, dataset), for forecasts of a step."""
    data = Sequences()
    model = GPT(data.characters)
    return model, Loss(), optimizer_of(model), data


def main() -> None:
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    data = Sequences()
    torch.manual_seed(settings["seed"])
    model = GPT(data.characters, settings["dropout_by_bytes"])
    optimizer = optimizer_of(model)
    net = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    net = torch.compile(net) if settings["torch_compile"] else net
    micro_batch, accumulation = (
        settings["per_device_train_batch_size"],
        settings["gradient_accumulation_steps"],
    )
    places = torch.Generator().manual_seed(settings["seed"])
    loss_of = Loss()
    torch.manual_seed(settings["seed"] + rank)
    began = time.perf_counter()
    for step in range(settings["max_steps"]):
        chosen = torch.randint(len(data), (micro_batch * accumulation * ranks,), generator=places)[
            rank::ranks
        ]
        total = 0.0
        for i, micro in enumerate(chosen.split(micro_batch)):
            pieces = [data[int(place)] for place in micro]
            x, targets = (torch.stack(column) for column in zip(*pieces, strict=True))
            waits = (
                contextlib.nullcontext() if ranks == 1 or i == accumulation - 1 else net.no_sync()
            )
            with waits:
                with torch.autocast("cpu", torch.bfloat16, enabled=settings["bf16"]):
                    loss = loss_of(net(x), targets) / accumulation
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and step % settings["logging_steps"] == 0:
            print(f"step {step}: loss {total:.4f}, {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
