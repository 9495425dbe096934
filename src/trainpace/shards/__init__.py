"""Precomputed samples: preprocessing runs once, and training reads Parquet shards every epoch."""

from typing import TYPE_CHECKING

from trainpace.core import exports

if TYPE_CHECKING:
    from trainpace.shards.computing import (
        Damage,
        Precomputed,
        Settings,
        estimate,
        precompute,
        verify,
    )
    from trainpace.shards.dataset import ShardDataset
    from trainpace.shards.files import part_of
    from trainpace.shards.precompute_worker import Estimate
    from trainpace.shards.user_dataset import is_task, length_of, made_by

__getattr__, __all__ = exports(__name__, __file__)
