"""A task's model as peft adapts it: frozen weights, quantised or not, and small trained ones beside them.

LoRA: Hu et al. 2021 (arXiv:2106.09685); DoRA: Liu et al. 2024 (arXiv:2402.09353); QLoRA: Dettmers et al. 2023 (arXiv:2305.14314).
The adapters are peft's own modules, so that what is traced is what peft runs.
"""

import warnings

from torch import nn

from trainpace.errors import TrainpaceError, UnknownName
from trainpace.trace.packages import import_package
from trainpace.trace.quantised import quantise
from trainpace.trace.task import Task
from trainpace.workload import Adaptation

ALL_LINEAR = "all-linear"
"""Every linear layer but the head's (peft's own word)."""


def adapted(task: Task, how: Adaptation) -> Task:
    """The task with its model adapted. Raises TrainpaceError for targets that the model does not have."""
    model = task.model
    if how.weights and how.adapter == "dora":
        raise TrainpaceError(
            f"{how.in_words} is not forecast: its norms of whole weights are not in the trace.", "Use lora."
        )
    if how.weights:
        quantise(model, how.weights)
        if not how.adapter:
            raise TrainpaceError(
                f"weights in {how.weights} cannot be trained: they are frozen, and there is nothing beside them.",
                "Add `adapter` lora.",
            )
    if not how.adapter:
        return task
    peft = import_package("peft", "peft")
    targets = how.targets if how.targets == ALL_LINEAR else [name.strip() for name in how.targets.split(",")]
    if targets == ALL_LINEAR and not hasattr(model, "get_output_embeddings"):
        # peft knows the head of transformers' models alone
        targets = sorted(
            {name.rpartition(".")[2] for name, child in model.named_modules() if isinstance(child, nn.Linear)}
        )
    config = peft.LoraConfig(
        r=how.rank, target_modules=targets, use_dora=how.adapter == "dora", lora_dropout=how.dropout
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return task._replace(model=peft.get_peft_model(model, config))
    except ValueError as error:
        names = sorted(
            {name.rpartition(".")[2] for name, child in model.named_modules() if isinstance(child, nn.Linear)}
        )
        if "not found" not in str(error):
            raise TrainpaceError(f"peft cannot adapt {task.name}: {str(error).splitlines()[0]}") from None
        raise UnknownName("target of the adapters", how.targets, names, f"Linear layers: {', '.join(names)}.") from None
