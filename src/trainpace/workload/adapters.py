"""A task's model as peft adapts it: frozen weights, quantised or not, and small trained ones beside them.

LoRA: Hu et al. 2021 (arXiv:2106.09685); DoRA: Liu et al. 2024 (arXiv:2402.09353); QLoRA: Dettmers et al. 2023 (arXiv:2305.14314).
The adapters are peft's own modules, so that what is traced is what peft runs.
"""

import warnings
from typing import Any

from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.workload.optional_packages import import_package
from trainpace.workload.quantised import QuantisedLinear, keep_fp32, quantise
from trainpace.workload.task import Task
from trainpace.workload.workload import Adaptation

ALL_LINEAR = "all-linear"
"""Every linear layer but the head's (peft's own word)."""


def _in_fp32(_: nn.Module, __: Any, out: Any) -> Any:
    """Results in fp32, as accelerate returns them from a model that it runs under autocast, the logits among them."""
    return import_package("accelerate", "accelerate").utils.convert_to_fp32(out)


def _holds_packed(model: nn.Module, name: str) -> bool:
    """Whether weights in the modules of that name are packed."""
    called = (module for known, module in model.named_modules() if known.endswith(name))
    return any(
        isinstance(inner, QuantisedLinear) for module in called for inner in module.modules()
    )


def adapted(task: Task, how: Adaptation) -> Task:
    """The task with its model adapted. Raises TrainpaceError for targets that the model does not have."""
    model = task.model
    if how.weights and how.adapter == "dora":
        raise TrainpaceError(
            f"{how.in_words} is not forecast: its norms of whole weights are not in the trace.",
            "Use lora.",
        )
    if how.weights:
        keep_fp32(model, how.fp32_weights)
        quantise(model, how.weights)
        model.register_forward_hook(_in_fp32)
        if not how.adapter:
            raise TrainpaceError(
                f"weights in {how.weights} cannot be trained: they are frozen, and there is nothing"
                " beside them.",
                "Add `adapter` lora.",
            )
    if not how.adapter:
        return task
    peft = import_package("peft", "peft")
    targets = (
        how.targets
        if how.targets == ALL_LINEAR
        else [name.strip() for name in how.targets.split(",")]
    )
    if targets == ALL_LINEAR and not hasattr(model, "get_output_embeddings"):
        # peft knows the head of transformers' models alone
        targets = sorted(
            {
                name.rpartition(".")[2]
                for name, child in model.named_modules()
                if isinstance(child, nn.Linear)
            }
        )
    whole = [name.strip() for name in how.whole.split(",") if name.strip()]
    missing = [
        name
        for name in whole
        if not any(known.endswith(name) for known, _ in model.named_modules())
    ]
    if missing:
        names = sorted({name.rpartition(".")[2] for name, _ in model.named_modules()} - {""})
        raise UnknownName("module to train whole", missing[0], names)
    packed = next((name for name in whole if _holds_packed(model, name)), None)
    if packed is not None:
        raise TrainpaceError(
            f"{packed} cannot be trained whole: its weights are packed in {how.weights}, and packed"
            " weights are frozen.",
            "Leave it out of --whole-modules, where it gets an adapter, or leave --weights out.",
        )
    config = peft.LoraConfig(
        r=how.rank,
        target_modules=targets,
        use_dora=how.adapter == "dora",
        lora_dropout=how.dropout,
        modules_to_save=whole or None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(model, config)
    except ValueError as error:
        names = sorted(
            {
                name.rpartition(".")[2]
                for name, child in model.named_modules()
                if isinstance(child, nn.Linear)
            }
        )
        if "not found" not in str(error):
            raise TrainpaceError(
                f"peft cannot adapt {task.name}: {str(error).splitlines()[0]}"
            ) from None
        raise UnknownName(
            "target of the adapters", how.targets, names, f"Linear layers: {', '.join(names)}."
        ) from None
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name and not how.as_the_model:
            parameter.keeps_dtype = (
                True  # peft keeps adapters of 16-bit models in fp32 (autocast_adapter_dtype)
            )
    return task._replace(model=model)
