"""Suggested changes for each cause, with the milliseconds per step that each should save.

A rule takes the recorded ranks and the split of their step, and yields the changes that the
recording supports. Rules only do arithmetic; they measure nothing. The rules for data loading are
in `loader_advice`.
"""

import math
import os
from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec.structs import replace

from trainpace.core.units import format_number
from trainpace.diagnose.loader_advice import (
    arrays,
    fewest_workers,
    no_workers,
    offline,
    whole_batches,
    worker_start,
)
from trainpace.diagnose.shares import (
    Advice,
    Split,
    advice,
    kernels_ms,
    part_ms,
    proof,
    same_host,
    sets_the_pace,
)
from trainpace.watch import Rank, batches_per_step, steps_per_epoch

WORTH = 0.03
"""Minimum share of the step that a worthwhile change saves.

Changes that save less are reported as not worth making.
"""
LESS_OFTEN = 10
"""Factor by which the advice reduces logging, checkpoints and evaluations."""
ONCE_AN_EPOCH = 1.5
"""Occurrences per epoch below which an event counts as once per epoch."""
ONE_LINE, MOST_LINES = 0.2, 2
"""Minimum share of a named line in the time of the script's own code, and the maximum number."""
FUSED = 0.4
"""Share of the time in memory-bound kernels that torch.compile saves. The optimizer is excluded.

On an H200, it saved 0.36 for a GPT and 0.40 for a ResNet-50 (benchmarks/results/diagnose_gpu.md).
On an H100, it saved 0.35 to 0.7 in three trainings, optimizer kernels included (fitting/data).
"""
LEAST_LAUNCH = 0.1
"""Minimum share of a step for advice on launch overhead or on a larger batch. Chosen by hand.

For a larger batch, the share is the time that does not grow with the batch size.
"""
LEAST_READ = 8
"""Number of tensor values that a forward pass may read in Python. Chosen by hand.

If it reads more, the graph breaks leave torch.compile little to gain.
"""
LARGER_BATCH = 4
"""Factor of the larger batch in the advice, and the batch size suggested for single samples."""
ONE_ROW = 0.5
"""Minimum share of FLOPs in matrix-vector products if a training computes one sample at a time."""
LOOPED = 0.5
"""Minimum share of operators that a loop over samples launches for samples after the second."""
LEAST_FAULTS = 0.03
"""Minimum share of a step for advice on page faults. Chosen by hand."""
VARIABLES: dict[str, int | str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
"""Environment variables of glibc's malloc (mallopt(3)) that avoid page faults.

No tensor gets a memory mapping of its own, and the heap keeps up to 2 GiB of free memory.
"""
LEAST_PADDING = 0.1
"""Minimum share of padding among all positions for advice on padding."""
_PRECISIONS = {
    "amp_bf16": (
        "autocast to bf16",
        "Run the forward pass and the loss under torch.autocast({device}, torch.bfloat16).",
    ),
    "tf32": (
        "TF32 in products of fp32 numbers",
        'torch.set_float32_matmul_precision("high") rounds the inputs of matmuls to 10 bits of'
        " mantissa; sums stay in fp32.",
    ),
}


_ELSEWHERE = (
    "The step waits less if this happens less often, in another thread or process, or once before"
    " training."
)
_IN_PARALLEL = (
    "The policy collects experience there for the next updates. Several environments at once, in"
    " processes of their own (SubprocVecEnv, gymnasium.vector.AsyncVectorEnv), share one call of"
    " the policy and use other cores."
)


def advise(ranks: Sequence[Rank], split: Split) -> list[Advice]:
    """Return every suggested change, the largest saving first. The saving may be 0."""
    # Some rules use rank 0 only. It may wait longer than the mean over ranks, which is the ceiling.
    changes = [
        replace(a, saves_ms=min(a.saves_ms, a.ceiling_ms))
        for rule in RULES
        for a in rule(ranks, split)
    ]
    return sorted(changes, key=lambda a: -a.saves_ms)


def _transfers(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    copies, tried = split.by_cause["host_to_device"], proof(ranks, "batch_on_device")
    proved = tried is not None and tried.settles and tried.saved_ms > 0
    if copies > 0:
        yield advice(
            split,
            "host_to_device",
            min(copies, tried.saved_ms) if tried is not None and proved else copies,
            title="copy less, and while the device computes",
            how=(
                "Send small types (uint8 images) and convert them on the device; do not copy data"
                " that is already there. pin_memory=True and .to(device, non_blocking=True) copy"
                " faster and let the host continue. Kernels run meanwhile only if the next batch is"
                " copied in its own stream."
            ),
            basis=(
                "steps with the batch left on the device"
                if proved
                else "time of the copies in the recorded steps"
            ),
        )


def _optimizer(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank = ranks[0]
    current = rank.optimizer_variants_ms.get("as it is")
    for name, ms in rank.optimizer_variants_ms.items():
        if current is not None and name != "as it is":
            yield advice(
                split,
                "optimizer",
                max(0.0, current - ms),
                title=f"{rank.optimizer}({name})",
                how=(
                    f"Measured on copies of these parameters: {format_number(ms)} ms per step"
                    f" instead of {format_number(current)}."
                ),
                basis="other implementations of this optimizer, timed in the script's process",
                optimizer=name,
            )


def _communication(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    exposed, micro = split.by_cause["communication"], batches_per_step(ranks[0])
    if len(ranks) < 2 and ranks[0].world_size < 2:
        return
    if micro >= 2 and not ranks[0].skips_sync:
        yield advice(
            split,
            "communication",
            exposed * (micro - 1) / micro,
            title="reduce gradients once a step, not once a micro-step",
            how=(
                f"Wrap the first {micro - 1:.0f} of {micro:.0f} micro-steps in model.no_sync()"
                " (accelerate: accelerator.accumulate(model))."
            ),
            basis="steps without communication",
            no_sync="yes",
        )
        return
    yield advice(
        split,
        "communication",
        exposed / 2,
        title="accumulate twice as many micro-steps between reductions",
        how=(
            "Use model.no_sync() in all but the last (DeepSpeed and Trainer:"
            " gradient_accumulation_steps). It doubles the global batch unless the micro-batch or"
            " the number of ranks is halved. A faster link, or gradients in bf16 (DDP's"
            " bf16_compress_hook: half the bytes), saves as much."
        ),
        basis="steps without communication; per step of the current size",
        accumulation_factor=2,
    )


def _straggler(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    lost = split.by_cause["straggler"]
    if not lost:
        return
    slow = next((r for r in ranks if r.rank == split.slowest_rank), ranks[0])
    more = _lag_ms(slow, [r for r in ranks if r is not slow])
    part = max(more, key=lambda name: more[name])
    spent_in = "the script's own code" if part == "other" else part.replace("_", " ")
    where = next((f", at {line.line}" for line in slow.lines if line.part == part), "")
    yield advice(
        split,
        "straggler",
        lost,
        title=f"repair straggler rank {slow.rank} on {slow.host}",
        how=(
            f"It takes {format_number(lost)} ms longer than the others, {format_number(more[part])}"
            f" of them in {spent_in}{where}. Look for a slower device, a busier host, or more work"
            " on that rank."
        ),
        basis=(
            "each rank's own pace in steps without communication"
            if slow.blocks
            else "the time that others wait for it in collectives"
        ),
    )


def _lag_ms(slow: Rank, rest: Sequence[Rank]) -> dict[str, float]:
    """Return how much longer a rank takes than the mean of the others in each part of the step."""
    return {
        part: _alone_ms(slow, part) - (fmean(_alone_ms(r, part) for r in rest) if rest else 0.0)
        for part in slow.parts_ms
    }


def _alone_ms(rank: Rank, part: str) -> float:
    """Return a part of the step in ms, without waiting for other ranks."""
    alone = part_ms(rank, "no_sync", part)
    if alone is not None:
        return alone
    return 0.0 if part == "communication" else rank.parts_ms[part]


def _less_often(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    rank = ranks[0]
    steps_an_epoch = steps_per_epoch(rank) or math.inf
    gradients = ""
    if any(r.evaluates_with_gradients for r in ranks):
        gradients = (
            " It keeps in memory what a backward pass would need: under torch.no_grad() it takes"
            " less memory and time."
        )
    for cause, title, how in (
        (
            "logging",
            f"log every {LESS_OFTEN} steps",
            "Each line to a file, a terminal or a server, and each .item() on a device, makes the"
            " step wait.",
        ),
        (
            "checkpoint",
            f"checkpoints 1/{LESS_OFTEN} as often",
            "Or write them while training continues: torch.distributed.checkpoint.async_save.",
        ),
        ("evaluation", f"evaluation 1/{LESS_OFTEN} as often", f"Or on fewer samples.{gradients}"),
    ):
        factor = LESS_OFTEN
        # If an evaluation runs once per epoch, a tenth of them would leave a short training none.
        in_epoch = rank.occasions.get(cause, 1.0) * steps_an_epoch
        if in_epoch < ONCE_AN_EPOCH:
            epochs, factor = max(2, round(2 / in_epoch)) if in_epoch else 2, 2
            half = "every second epoch" if epochs == 2 else f"half as often (every {epochs} epochs)"
            title = f"{cause}{'s' if cause == 'checkpoint' else ''} {half}"
        if split.by_cause[cause] > 0:
            yield advice(
                split,
                cause,
                split.by_cause[cause] * (1 - 1 / factor),
                title=title,
                how=how,
                basis="its time in the recorded steps",
                less_often=factor,
            )


def _own_code(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    lines = ranks[0].lines
    # A line that calls the model appears in all parts, so it is not the script's own code.
    trains = {line.line for line in lines if line.part in ("forward", "backward", "optimizer")}
    own = [
        line
        for line in lines
        if line.part == "other" and line.share >= ONE_LINE and line.line not in trains
    ]
    title, instead = "less of", _ELSEWHERE
    if ranks[0].collects_experience:
        title, instead = "collect faster at", _IN_PARALLEL
    for line in sorted(own, key=lambda line: -line.share)[:MOST_LINES]:
        calls, spent = f", in {line.called}" if line.called else "", split.by_cause["own_code"]
        yield advice(
            split,
            "own_code",
            spent * line.share,
            title=f"{title} {os.path.basename(line.line)}",
            how=(
                f"{line.share:.0%} of the script's own code between loading, model and optimizer"
                f" was seen at {line.line}{calls}. {instead}"
            ),
            basis="the share of stack samples at that line",
            ceiling_ms=spent * line.share,
            at_most=ranks[0].collects_experience,
        )


def _fewer_launches(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    launch, rank = split.by_cause["launch"], ranks[0]
    # For single samples or unbatched inputs, the advice on batching saves more than torch.compile.
    micro = round(batches_per_step(rank))
    if not _launches_much(split):
        return
    if _loops_over_samples(rank, split):
        yield advice(
            split,
            "launch",
            launch * (1 - batches_per_step(rank) / rank.samples_per_step),
            title="compute all samples of a batch at once",
            how=(
                f"{_small_operators(rank)}, and {rank.few_operators:,} for two samples: something"
                " loops over samples. Batched operators (or torch.vmap, torch.compile) replace"
                " many launches by one."
            ),
            basis="forward and backward without their large operators",
            batched="yes",
        )
    elif not _one_at_a_time(rank) and not _makes_batches(rank):
        compiled = "torch.compile, or CUDA graphs" if rank.accelerator else "torch.compile"
        whole = "operators on whole tensors instead of loops"
        yield advice(
            split,
            "launch",
            launch,
            title=whole if _reads_values(rank) else compiled,
            how=(
                f"{_small_operators(rank)}. {_compiled(rank)}."
                " No DataLoader was seen, so there is no advice about batches."
            ),
            basis="the whole time of launching, of which a part is saved",
            compile="yes",
        )
    elif not _one_at_a_time(rank) and micro > 1:
        yield advice(
            split,
            "launch",
            launch * (1 - 1 / micro),
            title=(
                f"one micro-batch of {rank.samples_per_step:.0f} samples instead of {micro}"
                " micro-batches"
            ),
            how=(
                f"{_small_operators(rank)}. If memory holds the {micro} micro-batches of a step as"
                " one, they are launched once. The update is the same, unless samples of a batch"
                " depend on each other: batch normalization, contrastive losses, or a mean over"
                " tokens if micro-batches have different numbers of them."
            ),
            basis="the line through steps with a full batch and with two samples",
            accumulation=1,
        )


def _launches_much(split: Split) -> bool:
    return split.by_cause["launch"] >= LEAST_LAUNCH * math.fsum(split.by_cause.values())


def _loops_over_samples(rank: Rank, split: Split) -> bool:
    """Return True if the operators are launched in a loop over samples.

    A larger batch makes such a loop longer.
    """
    few = 0 < rank.few_operators <= (1 - LOOPED) * rank.operators
    loops = few and rank.samples_per_step > batches_per_step(rank)
    return loops and split.fixed_ms is not None and split.fixed_ms < 0.5 * split.by_cause["launch"]


def _one_at_a_time(rank: Rank) -> bool:
    return 0 < ONE_ROW * rank.forward_flops <= rank.one_row_flops


def _makes_batches(rank: Rank) -> bool:
    return rank.loader is not None or rank.samples_per_step > 0


def _small_operators(rank: Rank) -> str:
    count = f"{rank.operators:,} operators per step" if rank.operators else "many small operators"
    small = (
        "too small to fill the device"
        if rank.accelerator
        else "so small that calling them takes longer than computing them"
    )
    return f"{count}, most {small}"


def _reads_values(rank: Rank) -> bool:
    return rank.values_read > LEAST_READ * batches_per_step(rank)


def _compiled(rank: Rank) -> str:
    """Describe how torch.compile helps with small operators. The sentence has no full stop."""
    if _reads_values(rank):
        return (
            f"A step's forward pass reads {rank.values_read:,} tensor values in Python (by .item(),"
            " or an `if` on a tensor), and each causes a graph break in torch.compile. Compiling"
            " helps once these values stay in tensors (torch.where, tensor indices)"
        )
    launches = (
        "torch.compile or CUDA graphs launch" if rank.accelerator else "torch.compile launches"
    )
    return f"{launches} fewer operators"


def _larger_batch(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise a larger batch if a large part of the step does not grow with the batch size.

    The same number of samples then needs fewer steps, so this part is spent less often.
    """
    rank, updates = ranks[0], split.by_cause["optimizer"]
    step = math.fsum(split.by_cause.values())
    if (
        not _makes_batches(rank)
        or round(batches_per_step(rank)) > 1
        or _loops_over_samples(rank, split)
        or _one_at_a_time(rank)
    ):
        return
    cause, what, compiled = "launch", _small_operators(rank), f" {_compiled(rank)}."
    shared = min(split.by_cause["launch"] + updates + split.by_cause["communication"], step)
    basis = "the line through steps with a full batch and with two samples"
    if not _launches_much(split):
        # Only the optimizer's time is saved, counted at its fastest implementation.
        now = rank.optimizer_variants_ms.get("as it is", 0.0)
        fastest = min(rank.optimizer_variants_ms.values(), default=0.0) / now if now else 1.0
        shared = updates * fastest if rank.samples_per_step else 0.0
        cause, basis, compiled = "optimizer", "the time of its fastest implementation", ""
        what = "The optimizer updates all parameters once per batch of any size"
    if shared >= LEAST_LAUNCH * step:
        yield advice(
            split,
            cause,
            shared * (1 - 1 / LARGER_BATCH),
            title=f"a batch {LARGER_BATCH} times as large",
            how=(
                f"{what}. Larger batches share that among more samples (mind the learning rate)."
                f" The saving is for the same number of samples in fewer steps.{compiled}"
            ),
            basis=f"{basis}; per step's worth of samples",
            ceiling_ms=shared,
            batch_factor=LARGER_BATCH,
        )


def _batch_of_samples(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise batching if the model computes one sample at a time.

    A matmul with a few vectors takes hardly longer than a matrix-vector product. The shapes of the
    matmuls reveal single samples, so the rule also works without a DataLoader.
    """
    rank, launch, compute = ranks[0], split.by_cause["launch"], split.by_cause["compute"]
    if not _one_at_a_time(rank):
        return
    share = rank.one_row_flops / rank.forward_flops
    alone = "" if _reads_values(rank) else " One at a time, torch.compile launches fewer operators."
    single = rank.one_row_flops / rank.product_flops * rank.products_ms
    shared = min(single, compute) + launch + split.by_cause["optimizer"]
    yield advice(
        split,
        "launch" if launch > compute else "compute",
        shared * (1 - 1 / LARGER_BATCH),
        title=f"a batch of {LARGER_BATCH} instead of single samples",
        how=(
            f"{share:.0%} of a forward pass's FLOPs are in products of a matrix with a single"
            " vector: one sample, or one position of a sequence, is computed at a time. Every step"
            " reads all weights for it; a batch would read them once. Collect several samples,"
            " padded to one length, and call the modules once for all of them (mind the learning"
            " rate). If no position depends on the one before it, give a module the whole sequence."
            f" The saving is for the same number of samples in fewer steps.{alone}"
        ),
        basis="products with single vectors, launching and the optimizer, each once per batch",
        ceiling_ms=shared,
        at_most=True,
        batched="yes",
    )


def _fewer_threads(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise fewer threads if threads wait for cores."""
    rank, freed = ranks[0], split.by_cause["threads"]
    here = same_host(ranks)
    processes = sum(1 + r.beside for r in here)
    fewer, cause, saves, basis = rank.fewer_threads, "threads", freed, "steps with fewer threads"
    waits = ". At the end of every operator all threads wait for the slowest"
    if not freed:
        fewer, cause, waits = max(1, rank.cpus // processes), "compute", ""
        threads = sum(r.threads * (1 + r.beside) for r in here)
        if rank.accelerator or threads <= rank.cpus or fewer >= rank.threads:
            return
        delayed = min(1.0, fmean(r.delayed_share for r in here))
        saves = (split.by_cause["compute"] + split.by_cause["launch"]) * delayed
        basis = "the time in which the processes waited for a core"
    yield advice(
        split,
        cause,
        saves,
        title=f"{fewer} thread{'s' if fewer > 1 else ''} per process instead of {rank.threads}",
        how=(f"{_setting_threads(rank, fewer)} {_sharing(rank, processes)}{waits}."),
        basis=basis,
        ceiling_ms=saves,
        threads=fewer,
    )


def _setting_threads(rank: Rank, fewer: int) -> str:
    if rank.threads_by:
        return (
            f"The script sets {rank.threads} threads at {rank.threads_by}. Remove that line, or set"
            f" {fewer}. OMP_NUM_THREADS outside the script has no effect."
        )
    return f"Set OMP_NUM_THREADS={fewer}, or call torch.set_num_threads({fewer})."


def _sharing(rank: Rank, processes: int) -> str:
    if processes > 1:
        return f"{processes} processes of {rank.threads} threads each share {rank.cpus} cores"
    if rank.threads > rank.cpus:
        return f"{rank.threads} threads share {rank.cpus} core{'s' if rank.cpus > 1 else ''}"
    return f"Other programs use the {rank.cpus} cores too"


def _lower_precision(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise a faster number format for matmuls that run in fp32.

    The saving follows from the FLOP/s that a large matmul reached on this device in that format.
    """
    rank = ranks[0]
    matmuls = min(kernels_ms(ranks).get("matrix", 0.0), split.by_cause["compute"])
    if not matmuls or not rank.flops or not sets_the_pace(ranks):
        return
    # Convolutions may already use TF32 when matmuls do not. They are then faster than a matmul.
    now = max(rank.matmul_gflops, rank.flops / (matmuls * 1e6))
    for name, gflops in rank.other_gflops.items():
        title, how = _PRECISIONS[name]
        yield advice(
            split,
            "compute",
            matmuls * max(0.0, 1 - now / gflops),
            title=title,
            how=(
                f"{how.format(device='device.type')} A large matmul reaches {gflops / 1e3:,.0f}"
                f" TFLOP/s that way, and {rank.matmul_gflops / 1e3:,.0f} now."
            ),
            basis=(
                "the time of matmuls, convolutions and attention, if they gain as a large matmul"
                " does"
            ),
            at_most=True,
            precision=name,
        )


def _fuse(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise torch.compile for memory-bound kernels, if no kernel is from Triton yet."""
    memory = kernels_ms(ranks).get("memory", 0.0) - split.by_cause["optimizer"]
    ceiling = min(memory, split.by_cause["compute"])
    fused = any("triton_" in name for rank in ranks for name in rank.device_kernels_ms)
    if ceiling > 0 and not fused and sets_the_pace(ranks):
        yield advice(
            split,
            "compute",
            FUSED * ceiling,
            title="torch.compile",
            how=(
                "Memory-bound kernels (element-wise operators, normalization) take"
                f" {format_number(ceiling)} ms. torch.compile can fuse neighbors, so that a tensor"
                " is read and written once."
            ),
            basis=f"{FUSED:.0%} of the time of memory-bound kernels without the optimizer's",
            ceiling_ms=ceiling,
            at_most=True,
            compile="yes",
        )


def _less_padding(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise less padding. The saving assumes that computing grows with the number of positions.

    Attention grows faster than that.
    """
    tokens, to_longest, positions = ranks[0].tokens
    if not positions or tokens > (1 - LEAST_PADDING) * positions:
        return
    computing = split.by_cause["compute"]
    padding = (
        f"{1 - tokens / positions:.0%} of the positions in a batch are padding (attention mask)."
    )
    basis = "the time of computing, if it grows with the number of positions"
    if to_longest <= (1 - LEAST_PADDING) * positions:
        yield advice(
            split,
            "compute",
            computing * (1 - to_longest / positions),
            title="padding to the longest sample of each batch",
            how=(
                f"{padding} Padding to the longest sample of each batch would compute"
                f' {to_longest / positions:.0%} of them. Tokenize without padding="max_length" and'
                " let a collator pad (transformers: DataCollatorWithPadding, or"
                " DataCollatorForSeq2Seq if the labels are sequences too)."
            ),
            basis=basis,
            padding="longest",
        )
    yield advice(
        split,
        "compute",
        computing * (1 - tokens / positions),
        title="batches of samples of similar lengths",
        how=(
            f"{padding} A sampler that puts samples of similar lengths into one batch leaves little"
            " of it, with padding to the longest of each batch. Hugging Face's Trainer has one for"
            ' samples that are dicts with "input_ids":'
            ' train_sampling_strategy="group_by_length", in transformers before 5'
            " group_by_length=True. It fails on other samples."
        ),
        basis=f"{basis} and no padding remains",
        at_most=True,
    )


def _keep_memory(ranks: Sequence[Rank], split: Split) -> Iterator[Advice]:
    """Advise to keep freed memory in the process if page faults take much of the step.

    The cost of a fault is the measured time of one that only writes to a new page. The estimate is
    an upper bound: faults of mapped files are counted too, and threads may share the work of
    clearing pages. For a character-level GPT, the rule predicted a saving of 41 ms out of 690 ms;
    the measured saving was 45 ms.
    """
    rank, computing = ranks[0], split.by_cause["compute"] + split.by_cause["launch"]
    spent = rank.page_faults * rank.page_fault_ns / 1e6
    if rank.accelerator or spent < LEAST_FAULTS * sum(split.by_cause.values()):
        return
    words = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    yield advice(
        split,
        "compute",
        spent,
        title="keep freed memory in the process",
        how=(
            f"A step has {rank.page_faults:,.0f} page faults,"
            f" {format_number(rank.page_fault_ns / 1e3)} us each: glibc returns the memory of large"
            " tensors to the system when they are freed, and the system clears every page before it"
            f" is used again. Start the training with {words} in its environment, or with another"
            " allocator such as jemalloc. The process then keeps its largest amount of memory."
        ),
        basis="page faults per step, and the time of one here",
        ceiling_ms=computing,
        at_most=True,
        **VARIABLES,
    )


RULES = (
    fewest_workers,
    no_workers,
    offline,
    arrays,
    whole_batches,
    worker_start,
    _transfers,
    _fewer_launches,
    _batch_of_samples,
    _larger_batch,
    _optimizer,
    _communication,
    _straggler,
    _less_often,
    _own_code,
    _fewer_threads,
    _lower_precision,
    _fuse,
    _less_padding,
    _keep_memory,
)
