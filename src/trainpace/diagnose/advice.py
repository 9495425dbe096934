"""Possible changes for each cause, with the milliseconds per step that each should save. Pure arithmetic on a recording."""

import math
import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.loader_advice import (
    fewest_workers,
    no_workers,
    offline,
    whole_batches,
    worker_start,
)
from trainpace.diagnose.shares import Advice, Split, kernels_ms, part_ms, proof, sets_the_pace
from trainpace.watch import Rank, batches_per_step

WORTH = 0.03
"""A change that saves a smaller share of the step than this is reported as not worth making."""
LESS_OFTEN = 10
ONCE_AN_EPOCH = 1.5
"""Fewer times an epoch than this is once."""
ONE_LINE, MOST_LINES = 0.2, 2
"""Of the script's own code, what is seen at one line, from which on that line is worth a word; and of how many lines."""


def advise(ranks: Sequence[Rank], split: Split) -> list[Advice]:
    """All changes for which the recording supports a figure, the largest saving first, including those that save nothing."""
    # one rank may wait longer than the mean of all, which is what its cause takes
    changes = [
        replace(a, saves_ms=min(a.saves_ms, a.ceiling_ms))
        for advisor in ADVISORS
        for a in advisor(ranks, split)
    ]
    return sorted(changes, key=lambda a: -a.saves_ms)


def _transfers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    copies, tried = split.by_cause["host_to_device"], proof(ranks, "batch_on_device")
    if copies > 0:
        proved = tried is not None and tried.settles and tried.saved_ms > 0
        yield Advice(
            cause="host_to_device",
            title="copy less, and while the device computes",
            how=(
                "Send small types (uint8 images) and convert on the device; leave out copies of"
                " data that is already there. pin_memory=True and .to(device, non_blocking=True)"
                " copy faster and let the host go on; kernels run meanwhile only where the next"
                " batch is copied in a stream of its own."
            ),
            saves_ms=min(copies, tried.saved_ms) if tried is not None and proved else copies,
            ceiling_ms=copies,
            basis=(
                "steps with the batch left on the device"
                if proved
                else "time of the copies in the recorded steps"
            ),
        )


def _optimizer(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank, spent = ranks[0], split.by_cause["optimizer"]
    variants = dict(rank.optimizer_variants_ms)
    current = variants.pop("as it is", None)
    if current is None:
        return
    for name, ms in sorted(variants.items(), key=lambda item: item[1]):
        yield Advice(
            cause="optimizer",
            title=f"{rank.optimizer}({name})",
            how=(
                f"Measured on copies of these parameters: {format_number(ms)} ms a step against"
                f" {format_number(current)}."
            ),
            saves_ms=max(0.0, min(current - ms, spent)),
            ceiling_ms=spent,
            basis="the same optimizer's other implementations, timed in the script's own process",
            settings={"optimizer": name},
        )


def _exchange(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    exposed, micro = split.by_cause["communication"], batches_per_step(ranks[0])
    if len(ranks) < 2 and ranks[0].world_size < 2:
        return
    if micro >= 2 and not ranks[0].skips_sync:
        yield Advice(
            cause="communication",
            title="exchange gradients once a step, not once a micro-step",
            how=(
                f"Wrap the first {micro - 1:.0f} of {micro:.0f} micro-steps in model.no_sync()"
                " (accelerate: accelerator.accumulate(model))."
            ),
            saves_ms=exposed * (micro - 1) / micro,
            ceiling_ms=exposed,
            basis="steps without exchange",
            settings={"no_sync": "yes"},
        )
        return
    yield Advice(
        cause="communication",
        title="accumulate twice as many micro-steps between exchanges",
        how=(
            "With model.no_sync() in all but the last (DeepSpeed and Trainer:"
            " gradient_accumulation_steps); it doubles the global batch unless the micro-batch or"
            " the number of ranks is halved. A faster link, or gradients in bf16 (DDP's"
            " bf16_compress_hook: half the bytes), saves as much."
        ),
        saves_ms=exposed / 2,
        ceiling_ms=exposed,
        basis="steps without exchange; per step of today's size",
        settings={"accumulation_factor": 2},
    )


def _straggler(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    lost = split.by_cause["straggler"]
    if not lost:
        return
    slow = next((r for r in ranks if r.rank == split.slowest_rank), ranks[0])
    rest = [r for r in ranks if r is not slow]

    def spent(rank: Rank, part: str) -> float:
        alone = part_ms(rank, "no_sync", part)
        return (
            alone if alone is not None else 0.0 if part == "communication" else rank.parts_ms[part]
        )

    def more(part: str) -> float:
        return spent(slow, part) - (fmean(spent(r, part) for r in rest) if rest else 0.0)

    part = max(slow.parts_ms, key=more)
    spent_in = "the script's own code" if part == "other" else part.replace("_", " ")
    where = next((f", at {line.line}" for line in slow.lines if line.part == part), "")
    yield Advice(
        cause="straggler",
        title=f"repair straggler rank {slow.rank} on {slow.host}",
        how=(
            f"It takes {format_number(lost)} ms longer than the others, {format_number(more(part))}"
            f" of them in {spent_in}{where}. Look for a slower device, a busier host, or more work"
            " on that rank."
        ),
        saves_ms=lost,
        ceiling_ms=lost,
        basis=(
            "each rank's own pace in steps without exchange"
            if slow.blocks
            else "the others' waiting for it in collectives"
        ),
    )


def _less_often(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Of what comes once an epoch, every second one: ten times as few would leave a short training without any."""
    rank = ranks[0]
    batches = rank.loader.batches if rank.loader is not None else None
    steps_an_epoch = batches / batches_per_step(rank) if batches is not None else math.inf
    for cause, title, how in (
        (
            "logging",
            f"log every {LESS_OFTEN} steps",
            (
                "Each line to a file, a terminal or a server, and each .item() on a device, makes"
                " the step wait."
            ),
        ),
        (
            "checkpoint",
            f"checkpoints 1/{LESS_OFTEN} as often",
            "Or write them while training continues: torch.distributed.checkpoint.async_save.",
        ),
        ("evaluation", f"evaluation 1/{LESS_OFTEN} as often", "Or on fewer samples."),
    ):
        spent, factor = split.by_cause[cause], LESS_OFTEN
        if cause == "evaluation" and any(r.evaluates_with_gradients for r in ranks):
            how += (
                " It keeps in memory what a backward pass would need: under torch.no_grad() it"
                " takes less memory and time."
            )
        if rank.occasions.get(cause, 1.0) * steps_an_epoch < ONCE_AN_EPOCH:
            title, factor = f"{cause}{'s' if cause == 'checkpoint' else ''} every second epoch", 2
        if spent > 0:
            yield Advice(
                cause=cause,
                title=title,
                how=how,
                saves_ms=spent * (1 - 1 / factor),
                ceiling_ms=spent,
                basis="its time in the recorded steps",
                settings={"less_often": factor},
            )


def _own_code(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """For the lines that most of the script's own time is seen at, unless it calls what trains: all parts are seen at that."""
    rank, spent = ranks[0], split.by_cause["own_code"]
    whole = {line.line for line in rank.lines if line.part in ("forward", "backward", "optimizer")}
    lines = [line for line in rank.lines if line.part == "other" and line.line not in whole]
    for line in sorted(
        (line for line in lines if line.share >= ONE_LINE), key=lambda line: -line.share
    )[:MOST_LINES]:
        place, calls = os.path.basename(line.line), f", in {line.called}" if line.called else ""
        yield Advice(
            cause="own_code",
            title=f"less of {place}",
            how=(
                f"{line.share:.0%} of the script's own code between loading, model and optimizer"
                f" was seen at {line.line}{calls}. If it can be done less often, in a thread or"
                " process beside the training, or once before it, a step waits less for it."
            ),
            saves_ms=spent * line.share,
            ceiling_ms=spent * line.share,
            basis="the share of samples of the stack at that line",
        )


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


LEAST_LAUNCH = 0.1
"""The least share of a step that launching takes, or what a larger batch shares, before there is advice about it. A judgement."""
LEAST_READ = 8
"""Values that a step may read, such as its loss and other figures for the log, before its forward pass counts as one that
torch.compile cannot take as a whole. A judgement."""
LARGER_BATCH = 4
ONE_ROW = 0.5
"""The share of a forward pass's FLOPs in products with a single vector from which on single samples are taken to be computed."""
LOOPED = 0.5
"""A script that loops over the samples of a batch launches at least this share of its operators for those beyond two of them."""


def fewer_launches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Fewer operators, or the same for more samples at once, with the batch as it is; `larger_batch` has the rest."""
    launch, rank = split.by_cause["launch"], ranks[0]
    if not _launches_much(split):
        return
    if _loops_over_samples(rank, split):
        samples = rank.samples_per_step / batches_per_step(rank)
        yield Advice(
            cause="launch",
            title="compute all samples of a batch at once",
            how=(
                f"{_small_operators(rank)}, and {rank.few_operators:,} for two samples: something"
                " loops over samples. Batched operators (or torch.vmap, torch.compile) replace"
                " many launches by one."
            ),
            saves_ms=launch * (1 - 1 / samples),
            ceiling_ms=launch,
            basis="forward and backward without their large operators",
            settings={"batched": "yes"},
        )
    elif one_at_a_time(rank):  # which is worth more together
        return
    elif not _makes_batches(rank):
        compiled = "torch.compile, or CUDA graphs" if rank.accelerator else "torch.compile"
        yield Advice(
            cause="launch",
            title=(
                "operators on whole tensors in place of loops" if _reads_values(rank) else compiled
            ),
            how=(
                f"{_small_operators(rank)}. {_compiled(rank)}."
                " No DataLoader was seen, so there is no advice about batches."
            ),
            saves_ms=launch,
            ceiling_ms=launch,
            basis="all of the time that launching takes, of which a part is saved",
            settings={"compile": "yes"},
        )
    elif (micro := round(batches_per_step(rank))) > 1:
        yield Advice(
            cause="launch",
            title=(
                f"one micro-batch of {rank.samples_per_step:.0f} samples instead of {micro}"
                " micro-batches"
            ),
            how=(
                f"{_small_operators(rank)}: where memory holds the {micro} micro-batches of a step"
                " as one, they are launched once. The update is the same, unless samples of a"
                " batch depend on each other: batch normalisation, contrastive losses, a mean over"
                " tokens of which micro-batches have different numbers."
            ),
            saves_ms=launch * (1 - 1 / micro),
            ceiling_ms=launch,
            basis="the line through steps with a full batch and with two samples",
            settings={"accumulation": 1},
        )


def _launches_much(split: Split) -> bool:
    return split.by_cause["launch"] >= LEAST_LAUNCH * math.fsum(split.by_cause.values())


def _loops_over_samples(rank: Rank, split: Split) -> bool:
    """Whether what launches is a loop over the samples of a batch, which a larger batch makes longer."""
    loops = 0 < rank.few_operators <= (
        1 - LOOPED
    ) * rank.operators and rank.samples_per_step > batches_per_step(rank)
    return loops and split.fixed_ms is not None and split.fixed_ms < 0.5 * split.by_cause["launch"]


def _makes_batches(rank: Rank) -> bool:
    return rank.loader is not None or rank.samples_per_step > 0


def _small_operators(rank: Rank) -> str:
    count = f"{rank.operators:,} operators a step" if rank.operators else "many small operators"
    small = (
        "too small to fill the device"
        if rank.accelerator
        else "so small that calling them takes longer than computing them"
    )
    return f"{count}, most {small}"


def _reads_values(rank: Rank) -> bool:
    """Whether a forward pass reads values at which torch.compile would break, beside a loss for the log."""
    return rank.values_read > LEAST_READ * batches_per_step(rank)


def _compiled(rank: Rank) -> str:
    """What torch.compile does about small operators, as a sentence without its full stop."""
    if _reads_values(rank):
        return (
            f"A step's forward pass reads {rank.values_read:,} tensor values in Python (by .item(),"
            " or an `if` on a tensor), and each causes a graph break in torch.compile: compiling"
            " helps once these values stay in tensors (torch.where, tensor indices)"
        )
    return (
        f"{'torch.compile or CUDA graphs launch' if rank.accelerator else 'torch.compile launches'}"
        " fewer operators"
    )


def larger_batch(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The same samples in fewer steps: per step of today's size, what does not grow with the batch is shared. Where launching is
    much of that, all of it; else the optimizer alone, as fast as it can be."""
    rank, updates = ranks[0], split.by_cause["optimizer"]
    step = math.fsum(split.by_cause.values())
    if (
        not _makes_batches(rank)
        or round(batches_per_step(rank)) > 1
        or _loops_over_samples(rank, split)
    ):
        return
    if one_at_a_time(rank):
        return
    if _launches_much(split):
        cause, shared = (
            "launch",
            min(split.by_cause["launch"] + updates + split.by_cause["communication"], step),
        )
        what = _small_operators(rank)
        instead = f" {_compiled(rank)}{'' if _reads_values(rank) else ', with the batch as it is'}."
        basis = "the line through steps with a full batch and with two samples"
    else:
        now = rank.optimizer_variants_ms.get("as it is", 0.0)
        fastest = min(rank.optimizer_variants_ms.values(), default=0.0) / now if now else 1.0
        cause, shared = "optimizer", updates * fastest if rank.samples_per_step else 0.0
        what, instead = "The optimizer updates all parameters once a batch, of whatever size", ""
        basis = "the time of its fastest implementation"
    if shared >= LEAST_LAUNCH * step:
        yield Advice(
            cause=cause,
            title=f"a batch {LARGER_BATCH} times as large",
            how=(
                f"{what}: larger batches share that among more samples (mind the learning rate)."
                f" The saving is that of as many samples in fewer steps.{instead}"
            ),
            saves_ms=shared * (1 - 1 / LARGER_BATCH),
            ceiling_ms=shared,
            basis=f"{basis}; a step's worth of samples",
            settings={"batch_factor": LARGER_BATCH},
        )


def one_at_a_time(rank: Rank) -> bool:
    return 0 < ONE_ROW * rank.forward_flops <= rank.one_row_flops


def together(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Several samples where one alone is computed: products with single vectors take hardly longer for a few of them."""
    rank = ranks[0]
    if not one_at_a_time(rank):
        return
    optimizer, launch = split.by_cause["optimizer"], split.by_cause["launch"]
    share = rank.one_row_flops / rank.forward_flops
    alone = "" if _reads_values(rank) else " One at a time, torch.compile launches fewer operators."
    shared = (
        min(rank.one_row_flops / rank.product_flops * rank.products_ms, split.by_cause["compute"])
        + launch
        + optimizer
    )
    yield Advice(
        cause="launch" if launch > split.by_cause["compute"] else "compute",
        title=f"a batch of {LARGER_BATCH} instead of single samples",
        how=(
            f"{share:.0%} of a forward pass's FLOPs are in products of a matrix with a single"
            " vector, so that one sample (or one position of a sequence) is computed at a time."
            " Every step reads all weights for it, which would be read once for a whole batch."
            " Collect several samples, padded to one length, and call the modules once for all of"
            " them (mind the learning rate); where no position depends on the one before it, give"
            " a module the whole sequence. The saving is for the same number of samples, in fewer"
            f" steps.{alone}"
        ),
        saves_ms=shared * (1 - 1 / LARGER_BATCH),
        ceiling_ms=shared,
        basis=(
            "products by single vectors, launching and the optimizer, each once for several samples"
        ),
        settings={"batched": "yes"},
        at_most=True,
    )


LEAST_SHARE = 0.03
"""Of a step, from which on page faults are worth a word. A judgement."""
VARIABLES: dict[str, int | str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
"""Of glibc (mallopt(3)): no tensor has a mapping of its own, and the top of the heap is not given back below 2 GiB."""


def keep_memory(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """The page faults of a step, each as long as one takes that only writes to new pages. Faults of mapped files are counted too,
    and where threads share the work of clearing pages, less is saved. Of the GPT on characters it told 41 of 690 ms where 45 were
    saved (docs/log.md, 2026-11-26)."""
    rank, computing = ranks[0], split.by_cause["compute"] + split.by_cause["launch"]
    spent = rank.page_faults * rank.page_fault_ns / 1e6
    if rank.accelerator or spent < LEAST_SHARE * sum(split.by_cause.values()):
        return
    words = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    yield Advice(
        cause="compute",
        title="keep freed memory in the process",
        how=(
            f"A step has {rank.page_faults:,.0f} page faults,"
            f" {format_number(rank.page_fault_ns / 1e3)} us each: glibc gives the memory of large"
            " tensors back to the system when they are freed, and the system clears every page"
            f" before it hands it out again. Start the training with {words} in its environment, or"
            " with another allocator, such as jemalloc. The process then holds on to the most"
            " memory that it has needed."
        ),
        saves_ms=min(spent, computing),
        ceiling_ms=computing,
        basis="page faults of a step, and the time of one here",
        settings=dict(VARIABLES),
        at_most=True,
    )


LEAST_PADDING = 0.1
"""Share of all positions from which on padding is worth a word."""


def less_padding(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Where a model computes for positions that its mask leaves out: each batch as long as its longest sample, and batches of
    similar samples. The time of computing is taken to grow with the number of positions; attention's grows faster.
    """
    tokens, to_longest, positions = ranks[0].tokens
    if not positions or tokens > (1 - LEAST_PADDING) * positions:
        return
    computing = split.by_cause["compute"]
    told = (
        f"{1 - tokens / positions:.0%} of the positions in a batch are padding, by the attention"
        " mask"
    )
    if to_longest <= (1 - LEAST_PADDING) * positions:
        yield Advice(
            cause="compute",
            title="padding to the longest sample of each batch",
            how=(
                f"{told}; padded only to the longest sample of each batch, there would be"
                f' {to_longest / positions:.0%} as many. Tokenize without padding="max_length" and'
                " let a collator pad (transformers: DataCollatorWithPadding)."
            ),
            saves_ms=computing * (1 - to_longest / positions),
            ceiling_ms=computing,
            basis="the time of computing, if it grows with the number of positions",
            settings={"padding": "longest"},
        )
    yield Advice(
        cause="compute",
        title="batches of samples of similar lengths",
        how=(
            f"{told}. A sampler that puts samples of similar lengths into one batch leaves little"
            ' of it (Hugging Face Trainer: train_sampling_strategy="group_by_length", in'
            " transformers before 5 group_by_length=True), with padding to the longest of each"
            " batch."
        ),
        saves_ms=computing * (1 - tokens / positions),
        ceiling_ms=computing,
        basis=(
            "the time of computing, if it grows with the number of positions and no padding remains"
        ),
        settings={"group_by_length": "true"},
        at_most=True,
    )


def fewer_threads(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Where ranks compute with more threads than their host has cores for, all of them wait for each other's."""
    rank, freed = ranks[0], split.by_cause["threads"]
    here = [r for r in ranks if r.host == rank.host]
    processes, threads = (
        sum(1 + r.beside for r in here),
        sum(r.threads * (1 + r.beside) for r in here),
    )
    if freed:
        fewer, cause, saves = rank.fewer_threads, "threads", freed
        basis, because = (
            "steps with fewer threads",
            ", and at the end of every operator all threads wait for the slowest",
        )
    else:
        fewer, cause = max(1, rank.cpus // processes), "compute"
        if rank.accelerator or threads <= rank.cpus or fewer >= rank.threads:
            return
        saves = (split.by_cause["compute"] + split.by_cause["launch"]) * min(
            1.0, fmean(r.delayed_share for r in here)
        )
        basis, because = "the time in which the processes waited for a core", ""
    yield Advice(
        cause=cause,
        title=f"{fewer} thread{'s' if fewer > 1 else ''} per process instead of {rank.threads}",
        how=(
            f"Set OMP_NUM_THREADS={fewer}, or call torch.set_num_threads({fewer})."
            f" {_sharing(rank, processes)}{because}."
        ),
        saves_ms=saves,
        ceiling_ms=saves,
        basis=basis,
        settings={"threads": fewer},
    )


def _sharing(rank: Rank, processes: int) -> str:
    if processes > 1:
        return f"{processes} processes of {rank.threads} threads each share {rank.cpus} cores"
    if rank.threads > rank.cpus:
        return f"{rank.threads} threads share {rank.cpus} core{'s' if rank.cpus > 1 else ''}"
    return f"Other programs use the {rank.cpus} cores too"


ADVISORS = (
    fewest_workers,
    no_workers,
    offline,
    whole_batches,
    worker_start,
    _transfers,
    fewer_launches,
    together,
    larger_batch,
    _optimizer,
    _exchange,
    _straggler,
    _less_often,
    _own_code,
    fewer_threads,
    lower_precision,
    in_bf16,
    fuse,
    less_padding,
    keep_memory,
)
