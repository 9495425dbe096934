"""Software that runs a step: framework, version, and implementations such as attention kernels.

A `Software` record contains the values that the user gave. None and an empty version stand for the
framework's default. Only this module knows the defaults of each card and version. Compilation and
the engine are fields of `Execution` instead, because a search varies them. The software is the same
for a whole search.
"""

import re
from typing import Literal, NamedTuple, get_args

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.records import Record

Framework = Literal["torch", "tensorflow", "jax"]

FusedAttention = Literal["efficient", "flash1", "flash2", "flash3", "flash4", "cudnn"]
Attention = Literal["eager", FusedAttention]
"""Implementation of attention.

- eager: Separate kernels for matmuls, mask, softmax and dropout, which store the scores
  (transformers' attn_implementation="eager", torch's SDPBackend.MATH). All others are fused.
- efficient: The memory-efficient kernel of xFormers and torch.
- flash1 to flash4: Versions of FlashAttention (Dao et al. 2022, Dao 2023, Shah et al. 2024 for
  Hopper, the fourth for Blackwell).
- cudnn: The kernel of cuDNN, used by NVIDIA's containers and Transformer Engine.
"""

OptimizerImplementation = Literal["foreach", "fused", "for_loop"]
"""Implementation of an optimizer in torch.optim.

- foreach: A kernel for each operation on several tensors. The default on CUDA since torch 2.0.
- fused: One kernel for the whole update.
- for_loop: Kernels for each tensor.
"""

CrossEntropy = Literal["plain", "uncompiled", "fused", "fused_fp32", "chunked"]
"""Implementation of cross-entropy.

- plain: The framework's own, with logits in fp32, their log-softmax and its gradient.
- uncompiled: Like plain, but outside the compiled model, so torch.compile does not see it.
- fused: One kernel that overwrites the logits with the gradient.
- fused_fp32: Like fused, on logits that the model's code has cast to fp32 (Liger's and Unsloth's
  cross_entropy in transformers).
- chunked: Head and loss together for a few tokens at a time, so all logits never exist at once
  (Liger's fused_linear_cross_entropy, Hsu et al. 2024).
"""

Fp8Recipe = Literal["per_tensor", "block", "mxfp8"]
"""FP8 recipe: a scale per tensor, per block of 128 (DeepSeek-V3), or per 32 (OCP Microscaling)."""

FUSED_ATTENTION = (2, 0)
"""First torch version with scaled_dot_product_attention, and with foreach optimizers by default."""
FLASH_ATTENTION_2 = (2, 2)
"""First torch version with FlashAttention 2, which replaced FlashAttention 1 on every card."""
ATTENTION_BY_CARD = (2, 10)
"""First torch version whose wheels prefer cuDNN's attention on some cards (aten's sdp_utils.cpp).
"""
INDUCTOR_OF_TODAY = (2, 2)
"""First torch version with the current torch.compile.

Older versions have more memory traffic and slower launches (GPTs under torch 2.1, the constants
compile_old_*). They also save nearly as many activations as eager mode: Languini's GPTs filled 80
GB at batches for which the forecast of eager mode is 79 to 91 GiB.
"""
QUICK_DISPATCH = (1, 10)
"""First torch version with the current dispatcher.

Older ones launch kernels several times more slowly (the constant host_old_torch).
"""
NEWEST = 4
"""First major version of torch that is rejected as a typo."""

_NAMES: dict[str, Framework] = {
    "torch": "torch",
    "pytorch": "torch",
    "tensorflow": "tensorflow",
    "tf": "tensorflow",
    "keras": "tensorflow",
    "jax": "jax",
    "flax": "jax",
}
_FRAMEWORKS: dict[Framework, str] = {"torch": "PyTorch", "tensorflow": "TensorFlow", "jax": "JAX"}
ATTENTION_IN_WORDS: dict[Attention, str] = {
    "eager": "eager attention",
    "efficient": "memory-efficient attention",
    "flash1": "FlashAttention 1",
    "flash2": "FlashAttention 2",
    "flash3": "FlashAttention 3",
    "flash4": "FlashAttention 4",
    "cudnn": "cuDNN's attention",
}
OPTIMIZERS_IN_WORDS: dict[OptimizerImplementation, str] = {
    "foreach": "a foreach optimizer",
    "fused": "a fused optimizer",
    "for_loop": "a for-loop optimizer",
}
FP8_IN_WORDS: dict[Fp8Recipe, str] = {
    "per_tensor": "FP8 with a scale per tensor",
    "block": "FP8 with a scale per block",
    "mxfp8": "MXFP8",
}
_FORMS = "Write torch2.8, torch, pytorch-1.9, tensorflow2.4, keras or jax."


Router = Literal["fp32", "16_bit"]
"""Number format of the router matmul in a mixture of experts whose code casts to fp32.

- fp32: fp32 operands.
- 16_bit: 16-bit operands with an fp32 result, by Transformer Engine (Megatron-Core's
  RouterGatingLinearFunction; TF32 in the backward pass).
"""


class Rewrites(NamedTuple):
    """Differences between a step and its trace. None and False mean no difference."""

    eager_attention: bool = False
    optimizer: OptimizerImplementation | None = None
    cross_entropy: CrossEntropy | None = None
    half_router: bool = False
    saves_as_eager: bool = False


class Software(Record):
    """Software that runs a step. An empty `version` means the current version."""

    framework: Framework = "torch"
    version: tuple[int, ...] = ()
    attention: Attention | None = None
    optimizer: OptimizerImplementation | None = None
    cross_entropy: CrossEntropy | None = None
    fp8_recipe: Fp8Recipe | None = None
    router: Router | None = None

    def __post_init__(self) -> None:
        if any(part < 0 for part in self.version):
            raise TrainpaceError(f"invalid version {self.version} of {self.framework}.", _FORMS)

    @property
    def is_before_fusion(self) -> bool:
        """True for torch before 2.0: unfused attention, for-loop optimizers, no torch.compile."""
        return self._is_torch_before(FUSED_ATTENTION)

    @property
    def slow_host(self) -> Literal["", "host_old_torch", "host_tensorflow"]:
        """Name of the constant for launches slower than with current torch, or ""."""
        if self.framework == "tensorflow":
            return "host_tensorflow"
        return "host_old_torch" if self._is_torch_before(QUICK_DISPATCH) else ""

    @property
    def has_old_inductor(self) -> bool:
        """True for the torch.compile of torch 2.0 and 2.1."""
        return self._is_torch_before(INDUCTOR_OF_TODAY)

    @property
    def compiles(self) -> bool:
        """True if the framework compiles every step, as JAX does with XLA."""
        return self.framework == "jax"

    @property
    def channels_last(self) -> bool:
        """True if the framework stores images as NHWC by default, as TensorFlow does."""
        return self.framework == "tensorflow"

    @property
    def fused_attention(self) -> FusedAttention | None:
        """Kernel of fused attention: the given one, or the version's default.

        None means the default of the card.
        """
        if self.attention is not None and self.attention != "eager":
            return self.attention
        if self._is_torch_before(FLASH_ATTENTION_2):
            return "flash1"
        return "flash2" if self._is_torch_before(ATTENTION_BY_CARD) else None

    @property
    def rewrites(self) -> Rewrites:
        """Differences from current torch, with which models are traced."""
        before = self.is_before_fusion
        eager = self.attention == "eager" or (before and self.attention is None)
        return Rewrites(
            eager,
            self.optimizer or ("for_loop" if before else None),
            self.cross_entropy,
            self.router == "16_bit",
            self.has_old_inductor,
        )

    @property
    def name(self) -> str:
        """Framework and version, such as "PyTorch 1.9" or "current PyTorch"."""
        known = _FRAMEWORKS[self.framework]
        version = ".".join(map(str, self.version))
        return f"{known} {version}" if version else f"{known} of today"

    def _is_torch_before(self, version: tuple[int, ...]) -> bool:
        return self.framework == "torch" and bool(self.version) and self.version < version


TODAY = Software()
"""Current version of torch with its defaults."""


def parse_software(text: str) -> Software:
    """Parse a framework and version, such as ``torch2.8``, ``PyTorch 2.8.0+cu128`` or ``keras``.

    Raises:
        UnknownName: If the framework is unknown.
        TrainpaceError: If the version is impossible.
    """
    words = re.match(r"\s*([A-Za-z_]+?)(?:[\s_=-]*v?(\d[\w.+-]*))?\s*$", text)
    name = words[1].casefold() if words else text.strip()
    framework = _NAMES.get(name)
    if words is None or framework is None:
        raise UnknownName("framework", name, _NAMES, _FORMS)
    version = parse_version(words[2] or "")
    known = version[0] < NEWEST if version else not words[2]
    if framework == "torch" and not known:
        raise TrainpaceError(f"unknown version of torch {text!r}: there are 0.4 to 2.x.", _FORMS)
    # Keras has its own version numbers, on which no forecast depends
    return Software(framework=framework, version=() if name == "keras" else version)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version such as "2.1.0a0+cu121". The result may be empty."""
    version = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    return (
        () if version is None else tuple(int(part) for part in version.groups() if part is not None)
    )


COMMON_SOFTWARE = (
    "torch2.11",
    "torch2.8",
    "torch2.1",
    "torch1.13",
    "torch1.9",
    "tensorflow",
    "jax",
)
"""Software versions with different forecasts, newest first, to offer as choices."""
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
_SPELLINGS: dict[str, Attention] = {
    "math": "eager",
    "manual": "eager",
    "mem_efficient": "efficient",
    "memory_efficient": "efficient",
    "efficient_attention": "efficient",
    "xformers": "efficient",
    "flash": "flash2",
    "flash_attention": "flash2",
    "flash_attention_1": "flash1",
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "flash_attention_4": "flash4",
    "cudnn_attention": "cudnn",
}
"""Names of the same kernels in other libraries."""


def parse_attention(text: str) -> Attention:
    """Return the implementation of attention with a library's name, such as ``math``.

    Raises:
        UnknownName: If the name is unknown.
    """
    word = re.sub(r"[\s-]+", "_", text.strip().casefold())
    for known in (word, word.replace("_", "")):
        if known in ATTENTIONS:
            return known
    if word in _SPELLINGS:
        return _SPELLINGS[word]
    raise UnknownName(
        "implementation of attention", text, ATTENTIONS, f"One of {', '.join(ATTENTIONS)}."
    )
