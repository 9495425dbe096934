"""``python -m trainpace.verify.worker``: the trainings of one process, or of one rank among several, in a process of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.process import explain, is_out_of_memory, serve
from trainpace.verify.question import Question, Variant


def _work(request: dict[str, Any]) -> str:
    """One sentence for each variant that failed in one process, by its key. Before the first that worked, a failure is the
    model's own, and raised; so is any failure of a rank, which others wait for."""
    question, folder = msgspec.convert(request["question"], Question), Path(request["folder"])
    variants = msgspec.convert(request["variants"], list[Variant])
    if "rank" in request:
        return _train_as_rank(question, variants, folder, request["rank"], request["store"])
    from trainpace.verify.training import train

    failed: dict[str, str] = {}
    for i, variant in enumerate(variants):
        try:
            train(question, variant, folder)
        except Exception as error:
            if (request["first"] and not i) or is_out_of_memory(error):
                raise
            failed[variant.key] = str(error) if isinstance(error, TrainpaceError) else explain(error)
    return json.dumps(failed)


def _train_as_rank(question: Question, variants: list[Variant], folder: Path, rank: int, store: str) -> str:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of parameters that it looks for in vain
    import torch
    import torch.distributed as dist

    from trainpace.verify.training import train

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // question.ranks))
    if sys.platform == "linux":  # a host whose own name does not resolve stops gloo
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=question.ranks)
    for variant in variants:
        train(question, variant, folder, rank)
        dist.barrier()  # no rank goes while another still talks to it
    return "{}"


if __name__ == "__main__":
    serve(_work)
