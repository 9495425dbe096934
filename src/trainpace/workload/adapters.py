"""Models as peft adapts them: frozen weights, quantised or not, with small trained ones.

[quantised] Frozen linear layers whose weights are kept in 4 bits, as bitsandbytes runs them (QLoRA: Dettmers et al. 2023,
arXiv:2305.14314).

A step runs under autocast, as transformers' Trainer runs it with bf16=True: adapters are in fp32, and so may be other weights.

A weight is packed, two numbers a byte, with a scale for 64 of them. Before each product, forward and again backward, a kernel
makes the whole weight in the products' format; it is gone after the product, and nothing is kept for a weight's gradient, which
a frozen weight does not have (bitsandbytes' MatMul4Bit). With double quantisation the scales are in 8 bits, with a scale in fp32
for 256 of them, and a kernel of their own comes before.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) as AutoGPTQ stores it: groups of 128 numbers of a column, each with a scale in fp16
and a zero of 4 bits, and an index of the group for each row; its Triton kernels make whole weights too (QuantLinearFunction).

[adapters] A task's model as peft adapts it: frozen weights, quantised or not, and small trained ones beside them.

LoRA: Hu et al. 2021 (arXiv:2106.09685); DoRA: Liu et al. 2024 (arXiv:2402.09353); QLoRA: Dettmers et al. 2023 (arXiv:2305.14314).
The adapters are peft's own modules, so that what is traced is what peft runs.
"""

import warnings
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.workload.model_spec import import_package
from trainpace.workload.task import Task
from trainpace.workload.workload import Adaptation

# --- quantised
BLOCK, SCALES_BLOCK = 64, 256
"""Numbers that share a scale, and scales that share one (bitsandbytes' functional.quantize_4bit)."""
GROUP = 128
"""Numbers that share a scale under GPTQ: AutoGPTQ's usual group_size."""

CONV1D = "Conv1D"
"""transformers' name of GPT-2's linear layers, whose weights are transposed."""
COMPUTE_DTYPE = torch.bfloat16
"""Of the products: bnb_4bit_compute_dtype as QLoRA is trained; bitsandbytes casts inputs to it and results back."""

_library = torch.library.Library("trainpace", "FRAGMENT")
_library.define("dequantize_scales(Tensor scales, Tensor scale) -> Tensor")
_library.define(
    "dequantize_4bit(Tensor packed, Tensor scales, int rows, int columns, ScalarType dtype) ->"
    " Tensor"
)
_library.impl(
    "dequantize_scales", lambda scales, _: torch.empty_like(scales, dtype=torch.float32), "Meta"
)
_library.impl(
    "dequantize_4bit",
    lambda packed, scales, rows, columns, dtype: torch.empty(
        (rows, columns), dtype=dtype, device=packed.device
    ),
    "Meta",
)


class _Product(torch.autograd.Function):
    """x times the weight, which is made anew in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "QuantisedLinear") -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.whole_weight(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.whole_weight(gradients[0].dtype), None


class QuantisedLinear(nn.Linear):
    """A frozen linear layer of packed weights. `numbers`: of its weight, of which it holds half as many bytes."""

    def __init__(self, linear: Any, weights: str) -> None:
        nn.Module.__init__(self)
        rows, columns = linear.weight.shape
        is_transposed = type(linear).__name__ == CONV1D
        self.out_features, self.in_features = (columns, rows) if is_transposed else (rows, columns)
        self.is_double = weights.endswith("_double")
        self.numbers = linear.weight.numel()
        is_gptq = weights == "gptq"
        blocks = -(-self.numbers // (GROUP if is_gptq else BLOCK))

        def frozen(n: int, dtype: torch.dtype) -> nn.Parameter:
            parameter = nn.Parameter(
                torch.empty(n, dtype=dtype, device="meta"), requires_grad=False
            )
            parameter.keeps_dtype = True  # type: ignore[attr-defined]
            return parameter

        self.weight = frozen(-(-self.numbers // 2), torch.uint8)
        self.scales = frozen(
            blocks, torch.uint8 if self.is_double else torch.float16 if is_gptq else torch.float32
        )
        if self.is_double:
            self.scale = frozen(-(-blocks // SCALES_BLOCK), torch.float32)
        if is_gptq:
            self.zeros = frozen(-(-blocks // 2), torch.uint8)
            self.groups = frozen(self.in_features, torch.int32)
        self.held = sum(parameter.numel() for parameter in self.parameters())
        bias = linear.bias
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        )

    def whole_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in a format, by the kernels that make it."""
        ops: Any = torch.ops.trainpace
        scales: torch.Tensor = self.scales
        if self.is_double:
            scales = ops.dequantize_scales(scales, self.scale)
        whole: torch.Tensor = ops.dequantize_4bit(
            self.weight, scales, self.out_features, self.in_features, dtype
        )
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x.to(COMPUTE_DTYPE), self)
        if self.bias is not None:
            out = out + self.bias.to(COMPUTE_DTYPE)
        return out.to(x.dtype)


def quantise(model: nn.Module, weights: str) -> None:
    """Put quantised layers in the place of a model's linear ones, but for its head, as transformers does; freeze all the rest.

    `weights`: nf4, fp4 (both in 4 bits), nf4_double with quantised scales, or gptq.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    linear = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if (type(child) is nn.Linear or type(child).__name__ == CONV1D) and child is not head
    ]
    if not linear:
        raise TrainpaceError(
            "the model has no linear layers whose weights could be quantised.",
            "Leave the option out.",
        )
    for module, name, child in linear:
        setattr(module, name, QuantisedLinear(child, weights))


def keep_fp32(model: nn.Module, which: str) -> None:
    """Mark the weights that stay in fp32 while the rest of the model is in 16 bits.

    all: every one that is not packed, as peft's prepare_model_for_kbit_training casts them. norms: TRL's SFTTrainer in bf16 casts
    embeddings and the head back after it (trl's peft_module_casting_to_bf16). none: neither is called where FSDP or ZeRO 3
    shard the packed weights, since a shard has one format.
    """
    for name, module in model.named_modules():
        if which == "all" or (
            which == "norms" and (isinstance(module, nn.LayerNorm) or "norm" in name)
        ):
            for parameter in module.parameters(recurse=False):
                parameter.keeps_dtype = True


def packed_away(model: nn.Module) -> int:
    """Numbers of a model's parameters beyond those that its tensors have: two are packed in a byte, and scales are none."""
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    return sum(layer.numbers - layer.held for layer in layers)


# --- adapters
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
