"""The number format that a transformers configuration says its weights are stored in. Needs no torch."""

from typing import Any

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Precision
from trainpace.core.intake import read_json
from trainpace.workload.model_spec import ModelSpec
from trainpace.workload.workload import Workload

STORAGE_KEYS = ("dtype", "torch_dtype")
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def stored_precision(spec: str | Workload) -> Precision | None:
    """The precision in which today's `from_pretrained` trains a model whose script says nothing of it: the file's, if of 16 bits.

    None for other models, and for a file that cannot be read, which the trace will refuse.
    """
    named = ModelSpec.of(spec)
    if named.kind != "transformers":
        return None
    try:
        values: Any = read_json(named.path)
    except TrainpaceError:
        return None
    parts = [values, values.get("text_config")] if isinstance(values, dict) else []
    stored = (part.get(key) for part in parts if isinstance(part, dict) for key in STORAGE_KEYS)
    return next(
        (_PRECISIONS[word] for word in stored if isinstance(word, str) and word in _PRECISIONS),
        None,
    )
