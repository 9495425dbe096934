"""Handmade recordings with known causes."""

from trainpace.watch import PARTS, Block, FetchCost, Loader, Rank, Recording


def parts(**ms):
    return {**dict.fromkeys(PARTS, 0.0), **ms}


def block(trial, **ms):
    whole = parts(**ms)
    return Block(trial=trial, steps=8, step_ms=sum(whole.values()), parts_ms=whole)


def loader(workers=0, batches=100, batch_size=16, **more):
    return Loader(
        dataset="Data",
        samples_in_dataset=batches * batch_size,
        batches=batches,
        batch_size=batch_size,
        workers=workers,
        prefetch_factor=2 if workers else None,
        pin_memory=False,
        persistent_workers=more.pop("persistent_workers", False),
        **more,
    )


def fetch(wall=1.0, cpu=1.0, collate=0.0, in_workers=False):
    return FetchCost(
        sample_wall_ms=wall,
        sample_cpu_ms=cpu,
        collate_ms=collate,
        batches=50,
        in_workers=in_workers,
    )


def rank(
    number=0, world_size=1, blocks=(), micro_steps=1.0, samples=16.0, cpus=8, threads=1, **more
):
    ms = parts(**{k: more.pop(k) for k in list(more) if k in PARTS})
    step = sum(ms.values())
    return Rank(
        rank=number,
        world_size=world_size,
        host="here",
        steps=50,
        step_ms=step,
        step_ms_low=0.98 * step,
        step_ms_high=1.02 * step,
        parts_ms=ms,
        micro_steps=micro_steps,
        samples_per_step=samples,
        cpus=cpus,
        torch="2",
        threads=threads,
        blocks=tuple(blocks),
        **more,
    )


def recording(*ranks, **more):
    return Recording(
        command=("python", "train.py"),
        seconds=1.0,
        exit_code=more.pop("exit_code", 0),
        ranks=ranks,
        **more,
    )
