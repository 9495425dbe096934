"""Apply peft adapters and weight quantization to a model before it is traced.

The base weights are frozen and may be quantized. Only the small adapters are trained. LoRA: Hu et
al. 2021 (arXiv:2106.09685). DoRA: Liu et al. 2024 (arXiv:2402.09353). QLoRA: Dettmers et al. 2023
(arXiv:2305.14314). The adapters are peft's own modules, so the trace contains exactly the operators
that peft runs.

Frozen 4-bit weights run as in bitsandbytes' MatMul4Bit. A weight is packed: two elements share a
byte, and 64 elements share a scale. Before each matmul of the forward and backward pass, a kernel
dequantizes the whole weight to the matmul's dtype. The dequantized copy is freed after the matmul.
A frozen weight has no gradient, so its layer saves no input. Double quantization stores the scales
in 8 bits, with an fp32 scale for every 256 of them. A separate kernel dequantizes the scales. Steps
run under autocast, as transformers' Trainer does with bf16=True. The adapters are in fp32; some
base weights may be too (`_keep_fp32`).

LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339) stores a weight in 8 bits, with an fp32 scale
per row. As in bitsandbytes' MatMul8bitLt, the backward pass dequantizes the whole weight. The
forward pass multiplies 8-bit inputs with 8-bit weights, and the few outlier columns in 16 bits. It
is modeled like the backward pass, because the kernels around an 8-bit matmul also take time.

GPTQ (Frantar et al. 2022, arXiv:2210.17323) is modeled as AutoGPTQ stores it. Each group of 128
elements of a column has an fp16 scale and a 4-bit zero point, and each row has a group index. The
Triton kernels of AutoGPTQ also dequantize whole weights (QuantLinearFunction).
"""

import re
import warnings
from typing import Any

import torch
from torch import nn

from trainpace.core.errors import TrainpaceError, UnknownName, as_sentence, message_of
from trainpace.workload.model_spec import import_package
from trainpace.workload.own_operators import define_operator
from trainpace.workload.task import Task
from trainpace.workload.workload import Adaptation

BLOCK, SCALES_BLOCK = 64, 256
"""Elements per scale, and scales per second-level scale (bitsandbytes' functional.quantize_4bit).
"""
GROUP = 128
"""Elements per scale in GPTQ. This is the usual group_size of AutoGPTQ."""
INT8 = "int8"
"""Name of the format of LLM.int8()."""
LIKE_16_BITS = (
    "8-bit matmuls are assumed to take as long as 16-bit matmuls of the dequantized weights."
)
CONV1D = "Conv1D"
"""Name of the class of GPT-2's linear layers in transformers. Their weights are transposed."""
COMPUTE_DTYPE = torch.bfloat16
"""Dtype of the matmuls with 4-bit weights: the usual bnb_4bit_compute_dtype.

bitsandbytes casts the input to this dtype, and the result back to the input's dtype.
"""
ALL_LINEAR = "all-linear"
"""Keyword of peft for every linear layer except the head."""
ATTENTION_PROJECTIONS = (".to_q", ".to_k", ".to_v", ".to_out.0")
"""Targets of LoRA in the training scripts of diffusers."""
ON_ATTENTION = (
    "Adapters are on the attention's to_q, to_k, to_v and to_out.0, as in the scripts of diffusers"
    " (--lora-targets)."
)

define_operator(
    "dequantize_scales",
    "(Tensor scales, Tensor scale) -> Tensor",
    lambda scales, _: torch.empty_like(scales, dtype=torch.float32),
)
define_operator(
    "dequantize",
    "(Tensor packed, Tensor scales, int rows, int columns, ScalarType dtype) -> Tensor",
    lambda packed, scales, rows, columns, dtype: packed.new_empty((rows, columns), dtype=dtype),
)


class _Matmul(torch.autograd.Function):
    """Matmul with a quantized weight, dequantized again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "QuantisedLinear") -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.whole_weight(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.whole_weight(gradients[0].dtype), None


class QuantisedLinear(nn.Linear):
    """Frozen linear layer with packed weights.

    Attributes:
        numbers: Number of elements of the unpacked weight.
        held: Number of elements of all stored parameters, without the bias. Two 4-bit weights are
            packed into one stored element; an 8-bit weight is one.
    """

    def __init__(self, linear: Any, weights: str) -> None:
        nn.Module.__init__(self)
        rows, columns = linear.weight.shape
        is_transposed = type(linear).__name__ == CONV1D
        self.out_features, self.in_features = (columns, rows) if is_transposed else (rows, columns)
        self.is_double = weights.endswith("_double")
        self.numbers = linear.weight.numel()
        is_gptq, is_int8 = weights == "gptq", weights == INT8
        block = self.in_features if is_int8 else GROUP if is_gptq else BLOCK
        blocks = -(-self.numbers // block)

        def frozen(n: int, dtype: torch.dtype) -> nn.Parameter:
            empty = torch.empty(n, dtype=dtype, device="meta")
            parameter = nn.Parameter(empty, requires_grad=False)
            parameter.keeps_dtype = True  # type: ignore[attr-defined]
            return parameter

        self.weight = frozen(self.numbers if is_int8 else -(-self.numbers // 2), torch.uint8)
        of_scales = torch.float16 if is_gptq else torch.float32
        self.scales = frozen(blocks, torch.uint8 if self.is_double else of_scales)
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
        """Dequantize the weight.

        Args:
            dtype: Dtype of the result.

        Returns:
            The weight, of shape (out_features, in_features).
        """
        ops: Any = torch.ops.trainpace
        scales: torch.Tensor = self.scales
        if self.is_double:
            scales = ops.dequantize_scales(scales, self.scale)
        whole: torch.Tensor = ops.dequantize(
            self.weight, scales, self.out_features, self.in_features, dtype
        )
        return whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Matmul.apply(x.to(COMPUTE_DTYPE), self)
        if self.bias is not None:
            out = out + self.bias.to(COMPUTE_DTYPE)
        return out.to(x.dtype)


def adapted(task: Task, how: Adaptation) -> Task:
    """Return the task with its model quantized, and with adapters added.

    The model is changed in place.

    Args:
        task: The task.
        how: The adapter, its rank and target modules, and the format of the frozen weights.

    Raises:
        TrainpaceError: If the model lacks the target modules or does not support the adaptation.
    """
    _check(how)
    if how.weights:
        _keep_fp32(task.model, how.fp32_weights)
        _quantise(task.model, how.weights)
        task.model.register_forward_hook(_in_fp32)
    if not how.adapter:
        return task
    model = _with_adapters(task, how)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name and not how.as_the_model:
            # peft casts the adapters of a 16-bit model to fp32 (autocast_adapter_dtype)
            parameter.keeps_dtype = True
    notes = [ON_ATTENTION] if how.targets == ALL_LINEAR and _is_diffusion(task.model) else []
    notes += [LIKE_16_BITS] if how.weights == INT8 else []
    return task._replace(model=model, notes=(*task.notes, *notes))


def _check(how: Adaptation) -> None:
    if how.weights and how.adapter == "dora":
        raise TrainpaceError(
            f"{how.in_words} cannot be forecast: the norms of full weight matrices, which DoRA"
            " computes, are not traced.",
            "Use lora.",
        )
    if how.weights and not how.adapter:
        raise TrainpaceError(
            f"weights in {how.weights} are frozen, so nothing would be trained.",
            "Add `adapter` lora.",
        )


def _in_fp32(_: nn.Module, __: Any, out: Any) -> Any:
    """Forward hook that casts outputs to fp32, as accelerate does under autocast."""
    return import_package("accelerate", "peft").utils.convert_to_fp32(out)


def _quantise(model: nn.Module, weights: str) -> None:
    """Freeze a model and quantize its linear layers except the head, as transformers does.

    Args:
        model: The model, changed in place.
        weights: nf4 or fp4 (4 bits), nf4_double (4 bits with quantized scales), int8 or gptq.

    Raises:
        TrainpaceError: If the model has no linear layers.
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
        raise TrainpaceError("the model has no linear layers to quantise.", "Omit --weights.")
    for module, name, child in linear:
        setattr(module, name, QuantisedLinear(child, weights))


def _keep_fp32(model: nn.Module, which: str) -> None:
    """Mark the weights that stay in fp32 when the rest of the model is cast to 16 bits.

    Args:
        model: The model before quantization.
        which: The weights to mark.

            - "all": Every weight, except those that are packed later. This matches peft's
              prepare_model_for_kbit_training, which casts them to fp32.
            - "norms": Only the weights of norms. TRL's SFTTrainer in bf16 casts the embeddings and
              the head back to bf16 (peft_module_casting_to_bf16).
            - "none": No weights. FSDP and ZeRO 3 need one dtype per shard, so neither function
              above is called.
    """
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.LayerNorm) or "norm" in name
        if which == "all" or (which == "norms" and is_norm):
            for parameter in module.parameters(recurse=False):
                parameter.keeps_dtype = True


def packed_away(model: nn.Module) -> int:
    """Return how many weights the model has beyond the elements that it stores.

    Two 4-bit weights share one stored element, so the number of parameters is too low.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    return sum(layer.numbers - layer.held for layer in layers)


def _with_adapters(task: Task, how: Adaptation) -> Any:
    peft, model = import_package("peft", "peft"), task.model
    config = peft.LoraConfig(
        r=how.rank,
        target_modules=_targets(model, how),
        use_dora=how.adapter == "dora",
        lora_dropout=how.dropout,
        modules_to_save=_whole_modules(model, how) or None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, config)
    except ValueError as error:
        if "not found" not in str(error):
            reason = as_sentence(message_of(error))
            raise TrainpaceError(f"peft cannot adapt {task.name}: {reason}") from None
        names = _last_names(model, nn.Linear)
        raise UnknownName(
            "target of the adapters", how.targets, names, f"Linear layers: {', '.join(names)}."
        ) from None


def _targets(model: nn.Module, how: Adaptation) -> str | list[str]:
    if how.targets != ALL_LINEAR:
        return _split(how.targets)
    # peft finds the head only in models of transformers; other models need the names of all layers
    if hasattr(model, "get_output_embeddings"):
        return ALL_LINEAR
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if _is_diffusion(model):
        linear = [name for name in linear if name.endswith(ATTENTION_PROJECTIONS)] or linear
    # peft takes a string for a pattern; the last name "0" of `to_out.0` would also match a block
    return "|".join(map(re.escape, linear))


def _is_diffusion(model: nn.Module) -> bool:
    return type(model).__module__.startswith("diffusers.")


def _whole_modules(model: nn.Module, how: Adaptation) -> list[str]:
    """Return the names of the modules to train in full, without adapters.

    Raises:
        UnknownName: If the model has no module of a name.
        TrainpaceError: If a module contains packed weights, which are frozen.
    """
    modules, whole = dict(model.named_modules()), _split(how.whole)
    for name in whole:
        named = [module for known, module in modules.items() if known.endswith(name)]
        if not named:
            raise UnknownName("module to train whole", name, _last_names(model, nn.Module))
        if any(isinstance(m, QuantisedLinear) for module in named for m in module.modules()):
            raise TrainpaceError(
                f"{name} cannot be trained whole: its weights are packed in {how.weights}, and"
                " packed weights are frozen.",
                "Remove it from --whole-modules, so that it gets an adapter, or omit --weights.",
            )
    return whole


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _last_names(model: nn.Module, kind: type) -> list[str]:
    """Return the last parts of the names of all modules of a class, such as q_proj, sorted."""
    named = (name for name, module in model.named_modules() if name and isinstance(module, kind))
    return sorted({name.rpartition(".")[2] for name in named})
