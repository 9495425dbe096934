"""Make a model on the meta device call the operators that it would call on CUDA.

On the meta device, dropout, attention and recurrent layers run as on a CPU, and autocast has no
effect. `CudaMapping` sees every torch function above autograd and substitutes the operators that
CUDA runs: fused dropout, flash or memory-efficient attention, and cuDNN's recurrent layers. It also
casts as autocast does, by the lists of torch's documentation ("CUDA Ops that can autocast").

Recurrent layers are modeled as in cuDNN (Appleyard et al. 2016, arXiv:1604.01946). For each layer
and direction, one matmul computes the inputs' part of all gates for all time steps. Then each time
step runs a matmul with the hidden state and one kernel for all element-wise work. In the backward
pass the time steps run in reverse. The gradient of each weight is one matmul over all time steps.
For some sizes in 16 bits, cuDNN uses persistent kernels, which keep the weights on the chip. They
are not modeled, so such layers run faster than forecast.

Some code reads values, which meta tensors do not have. A model that tests for finite numbers gets
the answer that all are finite. torch's checks of a distribution's parameters (`_is_all_true`)
succeed. The operators of these tests are recorded. Only the final conversion to a Python bool or
number is replaced by the answer.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trainpace.core.errors import TrainpaceError
from trainpace.workload.meta import map_tensors, tensors_in, without_data
from trainpace.workload.own_operators import selective_scan, sparse_call
from trainpace.workload.workload import GemmSizes

RELU, TANH, LSTM, GRU = range(4)
MODES = {torch.rnn_relu: RELU, torch.rnn_tanh: TANH, torch.lstm: LSTM, torch.gru: GRU}
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_SAVED_NUMBERS = {RELU: 1, TANH: 1, LSTM: 6, GRU: 5}
"""Numbers per time step and hidden unit that are saved for the backward pass.

They are the gates, for an LSTM also the cell state and its tanh, and for a GRU also the hidden
state and the recurrent part of the candidate.
"""


class Part(NamedTuple):
    """Kernel of a recurrent layer.

    Attributes:
        runs: Number of launches.
        matmul: Sizes of the matmul. None for an element-wise kernel.
        elements: Number of elements of an element-wise kernel.
    """

    runs: int
    matmul: GemmSizes | None
    elements: int = 0


def cudnn_call(mode: int, args: Sequence[Any]) -> Any:
    """Run a recurrent layer by the operator that CUDA uses.

    Args:
        mode: One of RELU, TANH, LSTM and GRU.
        args: Arguments of `torch.lstm`, `torch.gru` or `torch.rnn_*`.

    Returns:
        The layer's results. None for packed sequences, whose lengths are unknown values, and for
        LSTMs with projections, for which the cuDNN operator is not used here.
    """
    if isinstance(args[3], list | tuple):
        return None
    x, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    states = hidden if mode == LSTM else (hidden, None)
    h, c = states
    each = 4 if has_biases else 2
    projected = mode == LSTM and len(weights) == layers * (1 + bidirectional) * (each + 1)
    if projected:
        return None
    size = weights[1].shape[1]
    out, h, c, *_ = torch.ops.aten._cudnn_rnn(
        x,
        list(weights),
        each,
        None,
        h,
        c,
        mode,
        size,
        0,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [],
        None,
    )
    return (out, h, c) if mode == LSTM else (out, h)


def forward_result(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return empty results of _cudnn_rnn: output, hidden and cell state, saved values, dropout."""
    x, _, _, _, h, c, mode, size, _, layers, _, _, train, bidirectional = args[:14]
    directions = 1 + bidirectional
    steps = x.shape[0] * x.shape[1]
    kept = steps * layers * directions * _SAVED_NUMBERS[mode] * size if train else 0
    out = x.new_empty(*x.shape[:2], directions * size)
    cell = torch.empty_like(h if c is None else c)
    return out, torch.empty_like(h), cell, x.new_empty(kept), x.new_empty(0)


def backward_result(*args: Any) -> tuple[Any, ...]:
    """Return empty results of _cudnn_rnn_backward: the gradients of input, states and weights."""
    x, weights, h, c = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(x),
        torch.empty_like(h),
        torch.empty_like(h if c is None else c),
        [*map(torch.empty_like, weights)],
    )


def parts_of(name: str, args: Sequence[Any]) -> list[Part]:
    """Return the kernels of one call of _cudnn_rnn or _cudnn_rnn_backward."""
    backward = "backward" in name
    x = args[0]
    mode, size, _, layers, batch_first = args[10:15] if backward else args[6:11]
    bidirectional = args[17] if backward else args[13]
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    gates, directions, tokens = _GATES[mode] * size, 1 + bidirectional, x.shape[0] * x.shape[1]
    parts = []
    for layer in range(layers):
        width = x.shape[2] if layer == 0 else directions * size
        if backward:
            a_layer = [
                Part(length, GemmSizes(1, batch, size, gates)),
                Part(length, None, batch * (gates + 3 * size)),
                Part(1, GemmSizes(1, gates, width, tokens)),
                Part(1, GemmSizes(1, gates, size, tokens)),
                Part(1, None, tokens * gates),  # the biases
            ]
            if layer or args[21][0]:
                a_layer.append(Part(1, GemmSizes(1, tokens, width, gates)))
        else:
            a_layer = [
                Part(1, GemmSizes(1, tokens, gates, width)),
                Part(length, GemmSizes(1, batch, gates, size)),
                Part(length, None, batch * (2 * gates + 3 * size)),
            ]
        parts += a_layer * directions
    return parts


_TO_HALF = """
__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm mv prelu einsum
scaled_dot_product_attention bilinear _grouped_mm""".split()
_TO_FP32 = """
__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh
cosine_embedding_loss cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp
expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2
margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss nll_loss_nd
nll_loss2d norm pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss huber_loss
soft_margin_loss softmax softplus sum renorm tan triplet_margin_loss""".split()
_TO_WIDEST = "dot vdot tensordot grid_sampler index_put index_put_ scatter_add scatter_add_".split()
"""Functions that reject mixed dtypes. Autocast casts their inputs to the widest one."""
_OWNERS = (torch, torch.Tensor, F, torch._C._nn, torch._C._VariableFunctions)


def _functions(names: list[str]) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in _OWNERS for name in names if hasattr(owner, name)}


class CudaMapping(TorchFunctionMode):
    """Function mode that makes a step on the meta device run CUDA's operators.

    Activate it around the forward pass, the loss and the backward pass.

    Args:
        autocast: Cast as torch.autocast does. Grouped matmuls are cast too, as with FSDP's mixed
            precision.
        fused_attention: Use fused attention kernels.
        cpu: Model a CPU instead. Meta tensors already behave as on a CPU, except that a CPU fuses
            attention without dropout.
    """

    def __init__(self, autocast: bool, fused_attention: bool = True, cpu: bool = False) -> None:
        super().__init__()
        self._fused_attention = fused_attention
        self._cpu = cpu
        self._amp = autocast
        self._to_half = _functions(_TO_HALF)
        self._to_fp32 = _functions(_TO_FP32)
        self._to_widest = _functions(_TO_WIDEST)
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
        args, kwargs = self._autocast(func, args, kwargs)
        called = self._recurrent(func, args, kwargs)
        if called is not None:
            return called
        return (self._substitute(func, args, kwargs) or func)(*args, **kwargs)

    def _autocast(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._amp and func in self._to_half:
            return map_tensors(self._half, (args, kwargs))
        is_mixed = func in self._to_widest and any(
            t.dtype == torch.float32 for t in tensors_in((args, kwargs))
        )
        if self._amp and (is_mixed or func in self._to_fp32):
            return map_tensors(
                lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t,
                (args, kwargs),
            )
        return args, kwargs

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in MODES or self._cpu or kwargs:
            return None
        return cudnn_call(MODES[func], map_tensors(self._half, args) if self._amp else args)

    def _substitute(self, func: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """Return the function that CUDA runs in place of `func`, or None if it is the same."""
        if func in self._dropout and not self._cpu:
            return _dropout
        if func is torch.rand and args in _ONE_NUMBER:
            return lambda *_, **__: torch.ones(*args, device="cpu")
        if func in self._attention:
            dropout_p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            return partial(_attention, self._fused_attention and not (self._cpu and dropout_p))
        return taken_for_finite(func, args) or sparse_call(func, args)

    def _mixes(self, args: Any, kwargs: Any) -> bool:
        """Return True if the arguments mix host tensors and meta tensors."""
        kinds = {t.device.type for t in tensors_in((args, kwargs)) if t.dim()}
        return len(kinds) > 1 and "meta" in kinds

    def __exit__(self, *error: Any) -> None:
        """Leave the mode, and drop the cast weights as at the end of an autocast region.

        Recomputation of activations enters and leaves the mode once per block.
        """
        super().__exit__(*error)
        self.forget_casts()

    def forget_casts(self) -> None:
        """Drop the cache of cast weights, as torch does at the end of an autocast region."""
        self._cast_weights.clear()

    def _half(self, t: torch.Tensor) -> torch.Tensor:
        if t.dtype != torch.float32 or t.device.type != "meta":
            return t
        if not (t.is_leaf and t.requires_grad) or t._is_view():
            # autocast's cache holds only weights (cached_cast in ATen's autocast_mode.cpp)
            return t.to(torch.bfloat16)
        if id(t) not in self._cast_weights:
            # storing the weight too keeps it alive, so that no other tensor can get its id
            self._cast_weights[id(t)] = (t, t.to(torch.bfloat16))
        return self._cast_weights[id(t)][1]


_ONE_NUMBER: tuple[Any, ...] = (((),), ([],), (1,), ((1,),), ([1],))
"""Arguments of `torch.rand` for one number, which decides for example whether LayerDrop skips a
layer. The number is 1, so all layers run."""
# while a script is watched, torch.Tensor.to may be replaced, so take the base class's method
_TO: Any = torch._C.TensorBase.to
MOVES: set[Any] = {_TO, torch._C.TensorBase.cuda, torch._C.TensorBase.cpu}


def without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return (args, kwargs) of `.to`, `.cuda` or `.cpu` without the device."""
    left = {key: value for key, value in kwargs.items() if key != "device"}
    return tuple(a for a in args if not _is_device(a)), left


def moves_alone(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a call of `.to`, `.cuda` or `.cpu` does nothing without its device."""
    return func is not _TO or len(args) + len(kwargs) == 1


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | int | str) and not isinstance(value, bool)


def _is_devices(device: Any) -> bool:
    """Return True if a new tensor must be created on the meta device.

    A tensor that is created on the host explicitly keeps its values, since a model may read them.
    It becomes a meta tensor once it is used together with meta tensors.
    """
    return device is None or torch.device(device).type not in ("cpu", "meta")


def kept_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor in place of a host tensor. Scalars stay on the host.

    Raises:
        TrainpaceError: If the tensor is a weight, because its model is not part of the trace.
    """
    if tensor.device.type == "meta" or tensor.dim() == 0:
        return tensor
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
        raise TrainpaceError(
            "the step uses weights of a model that was not returned with it.",
            "List every model that the step calls in `model`, frozen ones too.",
        )
    return without_data(tensor)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of an object until the context ends. Attributes it lacks are ignored."""
    saved = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in saved:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def checkpoints_see_through(mapping: CudaMapping) -> Iterator[None]:
    """Keep the mapping on while activation checkpointing recomputes a block.

    Autograd's engine turns function modes off in the backward pass.
    """
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
    """Run the attention kernel that CUDA selects (sdp_utils).

    CUDA selects flash attention in 16 bits without a mask, and memory-efficient attention
    otherwise. Fused kernels need 4 dimensions. Other inputs run as plain matmuls and a softmax.
    """
    q, k, v = query, key, value
    if enable_gqa:
        k, v = _repeated(k, q.shape[-3]), _repeated(v, q.shape[-3])
    if q.dim() != 4 or not fused:
        plain = torch.ops.aten._scaled_dot_product_attention_math
        return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and _takes_flash(q, v):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _repeated(t: torch.Tensor, heads: int) -> torch.Tensor:
    return t if t.shape[-3] == heads else t.repeat_interleave(heads // t.shape[-3], -3)


def _takes_flash(q: torch.Tensor, v: torch.Tensor) -> bool:
    # flash attention needs values as wide as queries, unlike in multi-head latent attention
    # (check_head_dim_size_flash)
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256


_MARK = "_trainpace_answer"
_TESTS: dict[Any, bool] = {
    torch.isfinite: True,
    torch.Tensor.isfinite: True,
    torch.isnan: False,
    torch.Tensor.isnan: False,
    torch.isinf: False,
    torch.Tensor.isinf: False,
    torch._is_all_true: True,
}
_COMBINED = {torch.all, torch.any, torch.Tensor.all, torch.Tensor.any}
_TURNED = {torch.logical_not, torch.Tensor.logical_not, torch.Tensor.__invert__, torch.bitwise_not}
_ASKED = {torch.Tensor.__bool__, torch.Tensor.item}
_KNOWN = {*_TESTS, *_COMBINED, *_TURNED, *_ASKED}


def taken_for_finite(func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a substitute for a test for finite numbers, or for a function of its result.

    The result of a test is a meta tensor with a known answer as an attribute. Functions such as
    `all` and `logical_not` pass the answer on. `bool()` and `item()` return it.

    Args:
        func: The torch function.
        args: Its positional arguments.

    Returns:
        The substitute, or None if the function does not involve such a test.
    """
    if func not in _KNOWN:
        return None
    if func in _TESTS:
        return lambda *a, **k: _marked(func(*a, **k), _TESTS[func])
    # torch.any(input=x) has no positional argument
    answer = getattr(args[0], _MARK, None) if args else None
    if answer is None:
        return None
    if func in _ASKED:
        return lambda *_, **__: answer
    return lambda *a, **k: _marked(func(*a, **k), answer != (func in _TURNED))


def _marked(tensor: torch.Tensor, answer: bool) -> torch.Tensor:
    setattr(tensor, _MARK, answer)
    return tensor


@contextlib.contextmanager
def answered(autocast: bool, pads: bool) -> Iterator[None]:
    """Patch torch, transformers and TRL so that a step runs on the meta device.

    A function mode is off while it handles a function. Python functions of torch.nn.functional such
    as `dropout` would therefore hide the calls they make. They enter the mode only if
    `has_torch_function` returns True. Here it returns False, so their bodies run with the mode on.

    Args:
        autocast: Report autocast as enabled for the meta device.
        pads: True if batches contain padding, so attention needs a mask.
    """
    optimizers = sys.modules[
        torch.optim.Optimizer.__module__
    ]  # torch.optim hides it behind another name
    replacements = [
        (optimizers, {"_get_fused_kernels_supported_devices": lambda: ["cuda", "cpu", "meta"]}),
        (torch, _autocast(autocast)),
        (F, dict.fromkeys(_ASKS_FOR_MODES, lambda *_: False)),
        (torch.autocast, _autocast_on_meta()),
        (sys.modules.get("transformers.masking_utils"), _masks(pads)),
        (sys.modules.get("trl.kernels.chunked_logprob"), _FUSED_HEAD),
        (
            getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None),
            {"warn_if_padding_and_no_attention_mask": lambda *_: None},
        ),
    ]
    transformers = [m for name, m in sys.modules.items() if name.startswith("transformers.models.")]
    replacements += [(module, {"mamba_selective_scan": selective_scan}) for module in transformers]
    with contextlib.ExitStack() as stack:
        for owner, values in replacements:
            stack.enter_context(replaced(owner, **values))
        stack.enter_context(_flex_attention())
        yield


def _autocast_on_meta() -> dict[str, Any]:
    """Return a replacement of `torch.autocast.__init__` that accepts the meta device.

    transformers 4.45 disables autocast for the device of the rotary positions.
    """
    enter: Any = torch.autocast.__init__

    def init(region: Any, device_type: str, *settings: Any, **more: Any) -> None:
        enter(region, "cpu" if device_type == "meta" else device_type, *settings, **more)

    return {"__init__": init}


_ASKS_FOR_MODES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_OF_A_CALL = ("__code__", "__defaults__", "__kwdefaults__")
"""Attributes that define a function's behavior. Older torch has other arguments."""


@contextlib.contextmanager
def _flex_attention() -> Iterator[None]:
    """Replace flex_attention until the context ends, compiled or not.

    The function's code is replaced in place, since models may have imported it under any name.
    """
    function: Any = getattr(
        sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", None
    )
    if function is None:
        yield
        return
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    own = {name: getattr(function, name) for name in _OF_A_CALL}
    for name in _OF_A_CALL:
        setattr(function, name, getattr(_in_its_place, name))
    try:
        with (
            contextlib.nullcontext()
            if compiler is None
            else torch.compiler.set_stance("force_eager")
        ):
            yield
    finally:
        for name, value in own.items():
            setattr(function, name, value)


def _in_its_place(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # this code runs with the globals of torch's module, so it imports the names it needs
    from trainpace.workload.own_operators import flex_attention

    return flex_attention(query, key, value, block_mask, return_lse, return_aux)


def _autocast(autocast: bool) -> dict[str, Any]:
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(*device: str) -> bool:
        return autocast if device == ("meta",) else is_on(*device)

    def dtype(device: str) -> torch.dtype:
        return torch.bfloat16 if device == "meta" else dtype_of(device)

    return {"is_autocast_enabled": is_enabled, "get_autocast_dtype": dtype}


def _masks(pads: bool) -> dict[str, Any]:
    """Return replacements for the functions of transformers that test if a mask can be dropped.

    The originals read the values of the mask. The replacements decide from `pads`, the length and
    the window. No sample packs several sequences; otherwise transformers would read the position
    ids to find out.
    """

    def ignored(mask: Any, length: int, window: int | None = None) -> bool:
        return not (pads and mask is not None) and (window is None or length < window)

    return {
        "fast_all": lambda _: not pads,
        "_ignore_bidirectional_mask_sdpa": ignored,
        "find_packed_sequence_indices": lambda _: None,
    }


_FUSED_HEAD = {
    "TOKEN_CHUNK_SIZE": sys.maxsize,
    "_forward_tile": lambda tile, *_, **__: tile.amax(-1),
    "_backward_tile": lambda tile, *_, **__: tile.neg_(),
    "_addmm_fp32": lambda total, a, b: total.add_(torch.mm(a, b)),
}
"""Replacements for TRL's fused language-model head and loss.

The Triton kernels read each tile of logits once, TRL's torch functions ten times. All tokens are
one tile here, because a number of tiles is not affine in the batch size.
"""
