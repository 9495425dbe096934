"""``python -m trainpace.verify.worker``: the trainings of one process, in a process of its own."""

import json
from pathlib import Path
from typing import Any

import msgspec

from trainpace.errors import TrainpaceError
from trainpace.process import explain, is_out_of_memory, serve
from trainpace.verify.question import Question, Variant


def _work(request: dict[str, Any]) -> str:
    """One sentence for each variant that failed, by its key. Before the first that worked, a failure is the model's own."""
    from trainpace.verify.training import train

    question = msgspec.convert(request["question"], Question)
    failed: dict[str, str] = {}
    for i, variant in enumerate(msgspec.convert(request["variants"], list[Variant])):
        try:
            train(question, variant, Path(request["folder"]))
        except Exception as error:
            if (request["first"] and not i) or is_out_of_memory(error):
                raise
            failed[variant.key] = str(error) if isinstance(error, TrainpaceError) else explain(error)
    return json.dumps(failed)


if __name__ == "__main__":
    serve(_work)
