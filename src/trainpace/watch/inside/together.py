"""Several ranks in one training: whether there are others, and an answer that is the same for all."""

import contextlib
import datetime
import json
import sys
from typing import Any


def process_group() -> Any:
    """torch.distributed once it is initialised, None before or without it."""
    distributed: Any = sys.modules.get("torch.distributed")
    return (
        distributed
        if distributed and distributed.is_available() and distributed.is_initialized()
        else None
    )


def is_distributed() -> bool:
    distributed = process_group()
    return distributed is not None and int(distributed.get_world_size()) > 1


def agreed(about: str, answer: Any, patience_s: float) -> Any:
    """The first rank's answer for all: ranks that took different branches would wait for each other until a timeout."""
    if not is_distributed():
        return answer
    with contextlib.suppress(Exception):
        distributed = process_group()
        store, key = distributed.distributed_c10d._get_default_store(), f"trainpace-trials-{about}"
        if distributed.get_rank() == 0:
            store.set(key, json.dumps(answer))
        else:
            store.wait([key], datetime.timedelta(seconds=patience_s))
            return json.loads(store.get(key))
    return answer
