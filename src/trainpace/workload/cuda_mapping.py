"""Make a model on the meta device call what it would call on CUDA.

Meta tensors choose the CPU's composite paths for dropout and attention, and know no autocast. This mode sits above
autograd, sees every torch function, and puts CUDA's choices in their place: fused dropout, flash or memory-efficient
attention, and autocast's casts by the two lists of torch's documentation ("CUDA Ops that can autocast").
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trainpace.core.errors import TrainpaceError
from trainpace.workload.bare import without_data
from trainpace.workload.finite import taken_for_finite
from trainpace.workload.recurrent import MODES, cudnn_call
from trainpace.workload.sparse_products import sparse_call
from trainpace.workload.tensors import map_tensors, tensors_in

_TO_HALF = """__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d linear matmul mm mv prelu einsum scaled_dot_product_attention bilinear _grouped_mm""".split()
_TO_FP32 = """__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss
cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss
layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss
nll_loss nll_loss_nd nll_loss2d norm pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss huber_loss
soft_margin_loss softmax softplus sum renorm tan triplet_margin_loss""".split()
_OWNERS = (torch, torch.Tensor, F, torch._C._nn, torch._C._VariableFunctions)


def _functions(names: list[str]) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in _OWNERS for name in names if hasattr(owner, name)}


class CudaMapping(TorchFunctionMode):
    """Active around model, loss and backward of a meta-device model. `autocast` casts grouped products too, as FSDP's mixed
    precision does and torch's does not. For a `cpu` what meta tensors choose is right, but for attention without
    dropout, which is fused there too."""

    def __init__(self, autocast: bool, fused_attention: bool = True, cpu: bool = False) -> None:
        super().__init__()
        self._fused_attention = fused_attention
        self._cpu = cpu
        self._amp = autocast
        self._to_half = _functions(_TO_HALF)
        self._to_fp32 = _functions(_TO_FP32)
        self._dropout = _functions(["dropout"])
        self._attention = _functions(["scaled_dot_product_attention"])
        self._constructors = _device_constructors()
        self._cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._constructors and _is_devices(kwargs.get("device")):
            kwargs["device"] = "meta"
        elif func in MOVES and args[0].device.type == "meta":
            args, kwargs = without_device(args, kwargs)
            if moves_alone(func, args, kwargs):
                return args[0]
        elif self._mixes(args, kwargs):
            args, kwargs = map_tensors(kept_on_meta, (args, kwargs))
        if self._amp:
            if func in self._to_half:
                args, kwargs = map_tensors(self._half, (args, kwargs))
            elif func in self._to_fp32:
                args, kwargs = map_tensors(_fp32, (args, kwargs))
        if func in MODES and not self._cpu:
            on_half = map_tensors(self._half, args) if self._amp else args
            called = None if kwargs else cudnn_call(MODES[func], on_half)
            if called is not None:
                return called
        if func in self._dropout and not self._cpu:
            return _dropout(*args, **kwargs)
        if func in self._attention:
            dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return _attention(
                self._fused_attention and not (self._cpu and dropout_p), *args, **kwargs
            )
        answer = taken_for_finite(func, args) or sparse_call(func, args)
        return func(*args, **kwargs) if answer is None else answer(*args, **kwargs)

    def _mixes(self, args: Any, kwargs: Any) -> bool:
        """Whether a call has tensors of the host beside those of the device: constants that the model or its script made."""
        kinds = {t.device.type for t in tensors_in((args, kwargs)) if t.dim()}
        return len(kinds) > 1 and "meta" in kinds

    def __exit__(self, *error: Any) -> None:
        """Leave the autocast region, which recomputed activations enter block by block."""
        super().__exit__(*error)
        self.forget_casts()

    def forget_casts(self) -> None:
        """Leave the autocast region: its cache of cast weights is dropped, as torch does."""
        self._cast_weights.clear()

    def _half(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype != torch.float32 or t.device.type != "meta":
            return t
        if not (t.is_leaf and t.requires_grad) or t._is_view():
            return t.to(
                torch.bfloat16
            )  # autocast's cache holds weights alone (cached_cast in ATen's autocast_mode.cpp)
        if id(t) not in self._cast_weights:
            self._cast_weights[id(t)] = (
                t,
                t.to(torch.bfloat16),
            )  # a weight that is kept keeps its number
        return self._cast_weights[id(t)][1]


_TO: Any = torch._C.TensorBase.to  # torch.Tensor's may be the recorder's while a script is watched
MOVES: set[Any] = {_TO, torch._C.TensorBase.cuda, torch._C.TensorBase.cpu}


def without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a move without where it goes to."""
    left = {key: value for key, value in kwargs.items() if key != "device"}
    return tuple(a for a in args if not _is_device(a)), left


def moves_alone(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a move without its device does nothing."""
    return func is not _TO or len(args) + len(kwargs) == 1


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | int | str) and not isinstance(value, bool)


def _is_devices(device: Any) -> bool:
    """Whether a tensor made there is the device's. One that is made on the host by name keeps its values, since a model may count
    by them; beside tensors of the device it becomes one of them."""
    return device is None or torch.device(device).type not in ("cpu", "meta")


def kept_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A constant that the step keeps on the host is on the device in a real one. A weight is counted, or refused."""
    if tensor.device.type == "meta" or tensor.dim() == 0:
        return tensor
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        raise TrainpaceError(
            "the step uses weights of a model that is not among those returned with it.",
            "Name every model that the step calls in `model`, frozen ones too.",
        )
    return without_data(tensor)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Other values for attributes of a module, where it is loaded and has them, until the context is left."""
    saved = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in saved:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


def python_functions_see_through() -> contextlib.AbstractContextManager[None]:
    """Let torch.nn.functional's Python functions run their bodies, so that the mode sees the calls inside them.

    A function mode is switched off inside the Python function that it was called with; `multi_head_attention_forward`
    or `dropout` would hide what they call. They ask `has_torch_function` first: answering no sends them on.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    return replaced(F, **dict.fromkeys(names, lambda *_: False))


def unpacked_sequences() -> contextlib.AbstractContextManager[None]:
    """Say that no sample holds several sequences; transformers would look at the values of position ids to find out."""
    masking = sys.modules.get("transformers.masking_utils")
    if not hasattr(masking, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return replaced(masking, find_packed_sequence_indices=lambda _: None)


@contextlib.contextmanager
def checkpoints_see_through(mapping: CudaMapping) -> Iterator[None]:
    """Let recomputation under torch.utils.checkpoint see the mapping, which autograd switches off in the backward pass."""
    function: Any = torch.utils.checkpoint.checkpoint
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    saved = dict(function.__kwdefaults__)
    try:
        function.__kwdefaults__["context_fn"] = lambda: (contextlib.nullcontext(), mapping)
        yield
    finally:
        function.__kwdefaults__.update(saved)


def _dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, train: bool | None = None
) -> Any:
    active = training if train is None else train
    if not active or p == 0:
        return x
    return torch.native_dropout(x, p, True)[0]


def _attention(
    fused: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """CUDA's choice: flash for 16-bit without a mask, else memory-efficient (torch's sdp_utils order of preference).

    Fused kernels take 4 dimensions; other inputs run as plain products and a softmax. Flash takes no values of another width than
    queries and keys have (check_head_dim_size_flash), as in multi-head latent attention.
    """
    q, k, v = query, key, value
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    if q.dim() != 4 or not fused:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
    takes_flash = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256
    if takes_flash and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _fp32(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
