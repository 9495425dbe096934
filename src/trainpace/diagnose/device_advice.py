"""Changes that make computing shorter: other number formats, and fewer kernels of a device."""

from collections.abc import Iterator, Sequence

from trainpace.core.units import format_number
from trainpace.diagnose.changes import Advice
from trainpace.diagnose.device_shares import kernels_ms, sets_the_pace
from trainpace.diagnose.shares import Split, proof
from trainpace.watch import Rank

FUSED = 0.4
"""Of the time of memory-bound kernels without the optimizer's, what torch.compile saves: on an H200 0.36 of a GPT's and 0.40 of a
ResNet-50's (benchmarks/results/diagnose_gpu.md); on an H100 0.35 to 0.7 in three trainings, the optimizers' kernels included
(fitting/data)."""
_INSTEAD = {
    "amp_bf16": (
        "autocast to bf16",
        "Run the forward pass and the loss under torch.autocast({device}, torch.bfloat16).",
    ),
    "tf32": (
        "TF32 in products of fp32 numbers",
        (
            'torch.set_float32_matmul_precision("high") rounds the inputs of products to 10 bits of'
            " mantissa; sums stay in fp32."
        ),
    ),
}


def lower_precision(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """For products in fp32: the same at the rate that a large one reaches here in another number format."""
    rank, computing = ranks[0], split.by_cause["compute"]
    products = min(kernels_ms(ranks).get("matrix", 0.0), computing)
    if not products or not rank.flops or not sets_the_pace(ranks):
        return
    # convolutions may use TF32 where products do not, so that they are faster than a product is
    now = max(rank.matmul_gflops, rank.flops / (products * 1e6))
    for name, gflops in rank.other_gflops.items():
        title, how = _INSTEAD[name]
        how = how.format(device="device.type")
        rates = (
            f"A large product reaches {gflops / 1e3:,.0f} TFLOP/s so, and"
            f" {rank.matmul_gflops / 1e3:,.0f} as it is."
        )
        yield Advice(
            cause="compute",
            title=title,
            how=f"{how} {rates}",
            saves_ms=products * max(0.0, 1 - now / gflops),
            ceiling_ms=computing,
            basis=(
                "the time of products, convolutions and attention, if they gain what a large"
                " product gains"
            ),
            settings={"precision": name},
            at_most=True,
        )


def in_bf16(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """On a CPU: what steps with the model in bf16 took; nothing where noise leaves open whether they took less."""
    tried = proof(ranks, "bf16")
    # threads that wait for cores hide what computing takes, and bf16 may only use fewer of them
    if tried is None or not tried.settles or split.by_cause["threads"]:
        return
    title, how = _INSTEAD["amp_bf16"]
    how = how.format(device='"cpu"')
    computing = split.by_cause["compute"]
    saves = min(tried.saved_ms, computing) if tried.low_ms > 0 else 0.0
    yield Advice(
        cause="compute",
        title=title,
        how=(
            f"{how} With the model in bf16 a step took {format_number(tried.without_ms)} ms in"
            f" place of {format_number(tried.plain_ms)}: {format_number(tried.saved_ms)} less"
            f" ({format_number(tried.low_ms)} to {format_number(tried.high_ms)}). Compare the"
            " losses of some epochs. Hugging Face Trainer: bf16=True; Lightning:"
            ' precision="bf16-mixed".'
        ),
        saves_ms=saves,
        ceiling_ms=computing,
        basis="steps with the model in bf16",
        settings={"precision": "amp_bf16"},
    )


def fuse(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """torch.compile for kernels that only move data, where none of them is fused yet."""
    memory = kernels_ms(ranks).get("memory", 0.0) - split.by_cause["optimizer"]
    ceiling = min(memory, split.by_cause["compute"])
    fused = any("triton_" in name for rank in ranks for name in rank.device_kernels_ms)
    if ceiling <= 0 or fused or not sets_the_pace(ranks):
        return
    yield Advice(
        cause="compute",
        title="torch.compile",
        how=(
            "Memory-bound kernels (element-wise operators, normalisation) take"
            f" {format_number(ceiling)} ms. torch.compile can fuse neighbours, so that a tensor is"
            " read and written once."
        ),
        saves_ms=FUSED * ceiling,
        ceiling_ms=ceiling,
        basis=f"{FUSED:.0%} of the time of memory-bound kernels without the optimizer's",
        settings={"compile": "yes"},
        at_most=True,
    )
