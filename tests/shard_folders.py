"""Precomputed folders made without worker processes, and dataset files for worker processes."""

from trainpace.core.records import save
from trainpace.shards.files import (
    MANIFEST,
    PLAN,
    BadSample,
    Fingerprint,
    Manifest,
    ShardPlan,
    encode,
    write_shard,
)

NOTHING = Fingerprint(code={}, source={})

NUMBERS = """
import numpy as np

class Numbers:
    '''Sample i holds i.'''

    def __init__(self, count=90):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.full((3, 5), index, dtype=np.int32), index

def broken_at_7_and_50():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index in (7, 50):
                raise OSError("cannot identify image file")
            return super().__getitem__(index)
    return Broken()
"""


def write_folder(place, samples, shard_samples, group_rows, bad=()):
    """Write `samples` as a finished folder. Positions in `bad` are skipped."""
    place.mkdir(exist_ok=True)
    plan = ShardPlan(
        target="none.py:none",
        samples=len(samples),
        shard_samples=shard_samples,
        group_rows=group_rows,
        layout=encode(samples[0]).layout,
        fingerprint=NOTHING,
        probe_bytes=1.0,
    )
    shards = []
    for number in range(plan.shards):
        covered = plan.range_of(number)
        kept = [(i, encode(samples[i], plan.layout)) for i in covered if i not in bad]
        shards.append(
            write_shard(
                place,
                plan,
                number,
                kept,
                [BadSample(index=i, reason="bad") for i in covered if i in bad],
            )
        )
    save(plan, place / PLAN)
    save(Manifest(plan=plan, shards=tuple(shards)), place / MANIFEST)
    return place
