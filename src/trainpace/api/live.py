"""A live nn.Module as a workload: traced in this process, without its weights, from one example batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from msgspec.structs import replace

from trainpace.errors import TrainpaceError
from trainpace.verbs.request import request_of
from trainpace.verbs.training import TracedRequest
from trainpace.workload import Form

if TYPE_CHECKING:
    from torch import nn

    from trainpace.trace import Task


def is_live(model: object) -> TypeGuard[nn.Module]:
    """Is it a module? Without importing torch: where there is a module, torch has been imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


R = TypeVar("R", bound=TracedRequest)


def request_about(kind: type[R], model: object, options: Mapping[str, Any], forms: Sequence[Form] | None = None) -> R:
    """What a verb is asked about a model. A live one is traced here, as it cannot go to another process."""
    given = {name: options.get(name) for name in ("example", "loss", "task_optimizer")}
    options = {name: value for name, value in options.items() if name not in given}
    if is_live(model):
        request = request_of(kind, {"model": type(model).__name__, **options})
        for what in ("sequence_length", "image_size"):
            if getattr(request, what) is not None:
                raise TrainpaceError(f"the {what} of a live model is its example's.", f"Leave {what} out.")
        from trainpace.trace import trace_task

        task = _task(model, given["example"], given["loss"], given["task_optimizer"], request.variant.mode)
        return replace(request, model=trace_task(task, forms or request.forms, request.variant))
    if any(value is not None for value in given.values()):
        raise TrainpaceError("example, loss and task_optimizer go with a live nn.Module.", "Leave them out.")
    return request_of(kind, {"model": model, **options})


def _task(model: nn.Module, example: Any, loss: Any, optimizer: Any, mode: str) -> Task:
    from torch.utils._pytree import tree_leaves, tree_map

    from trainpace.trace import Task

    import torch  # isort: skip

    if isinstance(example, Mapping):  # such as Hugging Face's BatchEncoding, into which tree_leaves does not look
        example = dict(example)
    tensors = [t for t in tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()]
    if not tensors or not isinstance(example, dict | tuple | list) or len({len(t) for t in tensors}) != 1:
        raise TrainpaceError(
            "a live model needs `example`: one batch as the training has it, (input, ..., target) or a dict of tensors.",
            "Every tensor's first dimension is the batch.",
        )
    if loss is None and mode != "inference" and not isinstance(example, dict):
        raise TrainpaceError("a live model needs `loss`, which takes (output, target).", "Or mode='inference'.")
    if loss is not None and mode != "inference" and isinstance(example, dict) and "labels" not in example:
        raise TrainpaceError(
            "`loss` takes (output, labels), and the example has no labels.",
            "Put labels into it, or leave `loss` out where the model returns its own.",
        )
    size = len(tensors[0])

    def make_batch(n: int) -> Any:
        rows = [i % size for i in range(n)]
        return tree_map(lambda t: t[rows] if isinstance(t, torch.Tensor) and t.dim() else t, example)

    def forward(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*(batch if loss is None else batch[:-1]))

    def loss_of(model: nn.Module, batch: Any) -> Any:
        out = forward(model, batch)
        if loss is not None:
            return loss(out, batch["labels"] if isinstance(batch, dict) else batch[-1])
        value = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
        if not isinstance(value, torch.Tensor):
            raise TrainpaceError("model(**example) returns no loss.", "Put labels into the example, or give `loss`.")
        return value

    ids = example.get("input_ids") if isinstance(example, dict) else None
    length = int(ids.shape[1]) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None
    sample = f"{length} tokens" if length else " x ".join(map(str, tensors[0].shape[1:])) or "number"
    # a dataset makes _meta_batch build the batch here and move it, as the example's own tensors are no meta ones
    return Task(
        type(model).__name__, model, forward, loss_of, make_batch, optimizer, sample, length, dataset=(example,)
    )
