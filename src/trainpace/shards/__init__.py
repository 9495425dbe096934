"""Preprocessing done once instead of every epoch, into Parquet shards that stream back.

from trainpace.shards import ShardDataset, ShardStream
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainpace.shards.computing import Damage, Precomputed, estimate, precompute, read_plan, verify
    from trainpace.shards.dataset import ShardDataset, ShardStream
    from trainpace.shards.dataset_file import is_task, load_dataset, made_by
    from trainpace.shards.precompute_estimate import Estimate
    from trainpace.shards.slurm_array import array_script, part_of
    from trainpace.shards.work import Settings

_MODULES = {
    "Damage": "computing", "Estimate": "precompute_estimate", "Precomputed": "computing", "Settings": "work",
    "ShardDataset": "dataset", "ShardStream": "dataset", "array_script": "slurm_array", "estimate": "computing",
    "is_task": "dataset_file", "load_dataset": "dataset_file", "made_by": "dataset_file", "part_of": "slurm_array",
    "precompute": "computing", "read_plan": "computing", "verify": "computing",
}  # fmt: skip
__all__ = [
    "Damage", "Estimate", "Precomputed", "Settings", "ShardDataset", "ShardStream", "array_script", "estimate", "is_task",
    "load_dataset", "made_by", "part_of", "precompute", "read_plan", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Late, as most of this room needs torch or pyarrow."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
