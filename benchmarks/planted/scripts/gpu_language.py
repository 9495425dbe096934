"""A GPT on a GPU, with what people do around it: reading values, saving, evaluating, an optimizer that is no longer advised."""

import argparse
import gc
import os
import tempfile

import torch
from planting import report
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--tokens", type=int, default=1024)
parser.add_argument("--vocabulary", type=int, default=32768)
parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
parser.add_argument("--adamw", choices=["loop", "foreach", "fused"], default="fused")
parser.add_argument("--compile", action="store_true")
parser.add_argument(
    "--graph", action="store_true", help="replay forward and backward as CUDA graphs"
)
parser.add_argument("--log-every", type=int, default=50, help="read the loss")
parser.add_argument(
    "--norms-every", type=int, default=0, help="read norms and extremes of every gradient"
)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--evaluate-every", type=int, default=0)
parser.add_argument(
    "--clean-every", type=int, default=0, help="collect garbage and give cached memory back"
)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        heads = self.project(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.inner(self.norm2(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Parameter(torch.zeros(args.tokens, args.width))
        self.blocks = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
        self.norm, self.head = (
            nn.LayerNorm(args.width),
            nn.Linear(args.width, args.vocabulary, bias=False),
        )

    def forward(self, tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places)))


def loss_of(rows):
    return functional.cross_entropy(
        model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten()
    )


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
text = torch.randint(args.vocabulary, (1_000_000,))
model = Language().to(device)
chosen = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[
    args.adamw
]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **chosen)
if args.graph:
    sample = torch.zeros(args.batch, args.tokens, dtype=torch.long, device=device)
    model = torch.cuda.make_graphed_callables(model, (sample,))
if args.compile:
    model.compile()


def draw():
    starts = torch.randint(len(text) - args.tokens - 1, (args.batch,)).tolist()
    rows = torch.stack([text[start : start + args.tokens + 1] for start in starts])
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


losses, folder = [], tempfile.mkdtemp()
for step in range(1, args.steps + 1):
    loss = loss_of(draw())
    loss.backward()
    if args.norms_every and step % args.norms_every == 0:
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        spreads = {
            name: (p.grad.min().item(), p.grad.max().item()) for name, p in model.named_parameters()
        }
        print(
            f"step {step} largest norm {max(norms.values()):.4f} value {max(spreads.values())}",
            flush=True,
        )
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    if step % args.log_every == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if args.save_every and step % args.save_every == 0:
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(kept, os.path.join(folder, "last.pt"))
    if args.evaluate_every and step % args.evaluate_every == 0:
        model.eval()
        with torch.no_grad():
            total = sum(loss_of(draw()) for _ in range(32))
        print(f"step {step} evaluated {total.item() / 32:.4f}", flush=True)
        model.train()
    if args.clean_every and step % args.clean_every == 0:
        gc.collect()
        torch.cuda.empty_cache()
report(losses)
