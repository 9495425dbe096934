"""`trainpace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import ABOVE_0, AT_LEAST_1, COUNT, DURATION, echo_json, within

if TYPE_CHECKING:
    from trainpace.verify import Equivalence

_PRECISIONS = ["fp32", "bf16", "amp_bf16"]
_WAYS = ["accumulate", "ddp", "fsdp2"]


@click.command()
@click.argument("model")
@click.option("--batch", type=AT_LEAST_1, default="8", show_default=True, help="Samples per update.")
@click.option(
    "--accumulate", "parts", type=COUNT, default="4", show_default=True, help="Micro-batches of accumulation."
)
@click.option("--ranks", type=COUNT, default="2", show_default=True, help="Processes of DDP and FSDP2.")
@click.option("--steps", type=AT_LEAST_1, default="10", show_default=True, help="Updates.")
@click.option("--way", "ways", type=click.Choice(_WAYS), multiple=True, help="Only this one; several.  [default: all]")
@click.option("--precision", type=click.Choice(_PRECISIONS), default="fp32", show_default=True, help="Number format.")
@click.option("--optimizer", help="sgd, sgd_momentum, adam, adamw; without it the task's own, or sgd_momentum.")
@click.option("--sequence-length", type=AT_LEAST_1, help="Tokens in a sample.")
@click.option("--image-size", type=AT_LEAST_1, help="Side in pixels, for image models.")
@click.option(
    "--tolerance", type=within("difference", ABOVE_0, 0.1), default="1e-5", show_default=True,
    help="Up to this relative difference it is rounding.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Decides weights and samples.")
@click.option("--timeout", type=DURATION, default="10min", show_default=True, help="Give up on a training after this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(model: str, **o: Any) -> int:
    """Train MODEL for some steps as one big batch, by accumulation and on ranks, and say whether the weights come out the same.

    All trainings begin with the same weights and take the same samples, on the CPU. Where weights differ by more than
    rounding, one thing after another is changed on both sides until they agree: that is the cause. MODEL is named as in
    trainpace measure. Exit code 1: they differ.

    \b
    trainpace verify train.py:task
    trainpace verify resnet18 --image-size 64 --batch 16 --accumulate 4
    trainpace verify train.py:task --batch 10 --accumulate 4 --way accumulate
    """
    from trainpace.report.verify import equivalence_json, print_equivalence

    found = equivalence_of(model, o)
    if o["as_json"]:
        echo_json(equivalence_json(found))
    else:
        print_equivalence(found)
    return 0 if found.equal else 1


def equivalence_of(model: str, o: dict[str, Any]) -> Equivalence:
    """Train in every way that the options ask for, and compare."""
    from trainpace.launch.torchrun import Torchrun
    from trainpace.report.progress import Bar
    from trainpace.verify import Question
    from trainpace.verify.verify import verify as ask

    question = Question(
        model=model, batch=o["batch"], parts=o["parts"], ranks=o["ranks"], steps=o["steps"], ways=o["ways"] or tuple(_WAYS),
        precision=o["precision"], optimizer=o["optimizer"], sequence_length=o["sequence_length"],
        image_size=o["image_size"], tolerance=o["tolerance"], seed=o["seed"], timeout_s=o["timeout"],
    )  # fmt: skip
    with Bar(f"verifying {model}") as bar:
        return ask(question, Torchrun(), bar.say)
