"""Do accumulation, DDP and FSDP2 train as one big batch does: eight models, as `trainpace verify` says.

Run from the repository: PYTHONPATH=.zoo:tests/shims python benchmarks/equivalence.py. Kept in benchmarks/results/equivalence.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from trainpace.report import WAY_IN_WORDS
from trainpace.run import Equivalence, Question
from trainpace.run.equivalence import Change, verify

HERE = Path(__file__).parent
RESULT = HERE / "results" / "equivalence.md"
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 500,
    "n_positions": 64,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 64,
}
CASES: tuple[tuple[str, int | None, tuple[Change, ...]], ...] = (
    ("transformers:llama.json", None, ()),
    ("timm:vit_tiny_patch16_224", 64, ()),
    ("timm:convnext_atto", 64, ()),
    ("random_models.py:rnn_3", None, ("no_dropout",)),
    ("transformers:gpt2.json", None, ("no_dropout",)),
    ("torchvision:squeezenet1_1", 64, ("no_dropout",)),
    ("resnet18", 64, ("whole_batch_norm",)),
    ("mobilenet_v2", 64, ("whole_batch_norm", "no_dropout")),
)
"""Model, image size, and the cause that its layers make one expect."""


def _rows(found: Equivalence, expected: tuple[Change, ...]) -> list[str]:
    rows = []
    for way in found.ways:
        left = next((t.difference for t in way.tried if t.changes == way.cause), None)
        apart = way.failed or ("NaN" if way.difference is None else f"{way.difference:.1e}")
        said = "equal" if way.equal else ", ".join(way.cause) or "no cause found"
        held = way.equal if not expected else tuple(c for c in way.cause if c != "fp64") == expected
        rows.append(
            f"| {found.question.model} | {WAY_IN_WORDS[way.way]} | {apart} | {way.moved or 0:.1e} | {said} |"
            f" {'' if left is None else f'{left:.1e}'} | {'yes' if held else 'no'} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="only those whose name holds this")
    only = parser.parse_args().models
    lines: list[str] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (("gpt2.json", GPT2), ("llama.json", LLAMA)):
            Path(folder, name).write_text(json.dumps(config))
        for model, image_size, expected in CASES:
            if only not in model:
                continue
            spec = model.replace("transformers:", f"transformers:{folder}/")
            spec = spec.replace("random_models.py", f"{HERE}/random_models.py")
            found = verify(Question(model=spec, image_size=image_size))
            lines += [
                row.replace(f"{folder}/", "").replace(f"{HERE}/", "")
                for row in _rows(found, expected)
            ]
            print(*lines[-len(found.ways) :], sep="\n", flush=True)
    if only:
        return
    yes = sum(line.endswith("| yes |") for line in lines)
    q = Question(model="-")
    RESULT.write_text(
        "# Accumulation, DDP and FSDP2 against one big batch\n\n"
        f"{datetime.date.today()}, torch {version('torch')}, {platform.machine()} CPU, `python {' '.join(sys.argv)}`, "
        f"{time.monotonic() - begin:.0f} s on a machine with other work.\n\n"
        f"{q.steps} steps of {q.batch} samples in fp32 with SGD and momentum: at once, as {q.parts} micro-batches, and on"
        f" {q.ranks} ranks (gloo). Difference: the largest over parameter tensors of max |a - b| / max(|a|, |b|);"
        f" up to {q.tolerance:g} is called equal. Cause: what had to be changed on both sides for that."
        " Where fp64 stands beside another cause, that cause alone leaves rounding which training amplifies beyond the"
        " tolerance. Samples are random, drawn from the seed.\n\n"
        "| model | trained as | difference | weights moved | equal, or the cause | difference without it | as its layers say |\n"
        "|---|---|---:|---:|---|---:|---|\n"
        + "\n".join(lines)
        + f"\n\n{yes} of {len(lines)} as the layers say.\n"
    )


if __name__ == "__main__":
    main()
