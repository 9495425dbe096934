"""What software runs a step: the framework and its version, and which of several implementations of one calculation it takes.

A record holds what somebody said; None, and an empty version, stand for what the framework takes by itself. What that is on a
card, and how a version differs from today's, stands here alone. Whether a model is compiled, and the engine that exchanges its
gradients, are of an `Execution`: a plan weighs them against batches and sharding, whereas software is the same for all that a
search compares.
"""

import re
from typing import Literal, NamedTuple, get_args

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.records import Record

Framework = Literal["torch", "tensorflow", "jax"]

FusedAttention = Literal["efficient", "flash1", "flash2", "flash3", "flash4", "cudnn"]
Attention = Literal["eager", FusedAttention]
"""eager: products, mask, softmax and dropout as kernels of their own, which keep the scores (transformers'
attn_implementation="eager", torch's SDPBackend.MATH). The others are fused. efficient: xFormers' and torch's memory-efficient
kernel. flash1 to flash4: FlashAttention's versions (Dao et al. 2022, Dao 2023, Shah et al. 2024 for Hopper, the fourth for
Blackwell). cudnn: cuDNN's, which NVIDIA's containers and Transformer Engine take."""

OptimizerImplementation = Literal["foreach", "fused", "for_loop"]
"""torch.optim's three: several tensors a kernel and one kernel an operation (the default on CUDA since torch 2.0), one kernel
for the whole update (`fused=True`), tensor by tensor."""

CrossEntropy = Literal[
    "plain", "uncompiled", "fused", "fused_fp32", "chunked", "cut", "vocab_parallel"
]
"""plain: the framework's own, with logits in fp32, their log-softmax and its gradient. uncompiled: the same, called on what a
compiled model returns, so that torch.compile does not see it. fused: one kernel that leaves the gradient in the place of the
logits. fused_fp32: the same on logits that the model's code has cast to fp32 (Liger's and Unsloth's cross_entropy in
transformers). chunked: head and loss together over a few tokens at a time, so that the logits are never whole (Liger's
fused_linear_cross_entropy, Hsu et al. 2024). cut: their logits are never written (cut cross-entropy, Wijmans et al. 2025).
vocab_parallel: Megatron's, in place, which tensor-parallel ranks divide."""

Fp8Recipe = Literal["per_tensor", "block", "mxfp8"]
"""What shares a scale: a tensor, a block of 128 numbers (DeepSeek-V3), 32 numbers (OCP Microscaling)."""

FUSED_ATTENTION = (2, 0)
"""torch.nn.functional.scaled_dot_product_attention came with torch 2.0, and foreach became its optimizers' default."""
FLASH_ATTENTION_2 = (2, 2)
"""torch 2.2 took FlashAttention's second version in place of the first, on every card."""
ATTENTION_BY_CARD = (2, 10)
"""torch's wheels since 2.10 bring a cuDNN whose attention comes before FlashAttention on some cards (aten's sdp_utils.cpp)."""
INDUCTOR_OF_TODAY = (2, 2)
"""Before it, torch.compile left more traffic and launched more slowly (GPTs under torch 2.1: the constants compile_old_*)."""
QUICK_DISPATCH = (1, 10)
"""torch's dispatcher before this launched kernels several times slower than today's (the constant host_old_torch)."""
NEWEST = 4
"""A torch of this major version or a later one is a typing mistake."""

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
    "for_loop": "an optimizer that goes tensor by tensor",
}
FP8_IN_WORDS: dict[Fp8Recipe, str] = {
    "per_tensor": "FP8 with a scale a tensor",
    "block": "FP8 with a scale a block",
    "mxfp8": "MXFP8",
}
_FORMS = "Write torch2.8, torch, pytorch-1.9, tensorflow2.4, keras or jax."


Router = Literal["fp32", "16_bit"]
"""What the product of a mixture's router multiplies where the model's code casts it to fp32. 16_bit: operands in 16 bits with a
result in fp32, by Transformer Engine (Megatron-Core's RouterGatingLinearFunction; backward it takes TF32)."""


class Rewrites(NamedTuple):
    """How a step differs from the one that was traced; None: as traced."""

    eager_attention: bool = False
    optimizer: OptimizerImplementation | None = None
    cross_entropy: CrossEntropy | None = None
    half_router: bool = False


class Software(Record):
    """What runs a step. `version` is of torch; today's where it is empty."""

    framework: Framework = "torch"
    version: tuple[int, ...] = ()
    attention: Attention | None = None
    optimizer: OptimizerImplementation | None = None
    cross_entropy: CrossEntropy | None = None
    fp8_recipe: Fp8Recipe | None = None
    router: Router | None = None

    def __post_init__(self) -> None:
        if any(part < 0 for part in self.version):
            raise TrainpaceError(
                f"version {self.version} of {self.framework} is not a version.", _FORMS
            )

    @property
    def is_before_fusion(self) -> bool:
        """torch before 2.0: attention in kernels of its own, optimizers tensor by tensor, no torch.compile."""
        return self._is_torch_before(FUSED_ATTENTION)

    @property
    def slow_host(self) -> Literal["", "host_old_torch", "host_tensorflow"]:
        """The kernel model's constant by which its host launches slower than today's torch; empty for none."""
        if self.framework == "tensorflow":
            return "host_tensorflow"
        return "host_old_torch" if self._is_torch_before(QUICK_DISPATCH) else ""

    @property
    def has_old_inductor(self) -> bool:
        """torch.compile of 2.0 and 2.1."""
        return self._is_torch_before(INDUCTOR_OF_TODAY)

    @property
    def compiles(self) -> bool:
        """Whether every step is compiled without being asked to: XLA does it under JAX."""
        return self.framework == "jax"

    @property
    def channels_last(self) -> bool:
        """Whether images are NHWC without being asked for: TensorFlow's default."""
        return self.framework == "tensorflow"

    @property
    def fused_attention(self) -> FusedAttention | None:
        """The kernels of attention where it is fused: those said, else what the version takes; None: what is usual on a card."""
        if self.attention is not None and self.attention != "eager":
            return self.attention
        if self._is_torch_before(FLASH_ATTENTION_2):
            return "flash1"
        return "flash2" if self._is_torch_before(ATTENTION_BY_CARD) else None

    @property
    def rewrites(self) -> Rewrites:
        """What runs in another way than torch of today, which traces hold, would run it."""
        before = self.is_before_fusion
        eager = self.attention == "eager" or (before and self.attention is None)
        return Rewrites(
            eager,
            self.optimizer or ("for_loop" if before else None),
            self.cross_entropy,
            self.router == "16_bit",
        )

    @property
    def name(self) -> str:
        """The framework and its version: PyTorch 1.9, PyTorch of today."""
        known = _FRAMEWORKS[self.framework]
        return (
            f"{known} {'.'.join(map(str, self.version))}" if self.version else f"{known} of today"
        )

    def _is_torch_before(self, version: tuple[int, ...]) -> bool:
        return self.framework == "torch" and bool(self.version) and self.version < version


TODAY = Software()
"""torch of today, as it comes."""


def parse_software(text: str) -> Software:
    """A framework, with its version where it has one: ``torch2.8``, ``PyTorch 2.8.0+cu128``, ``tensorflow2.4``, ``keras``.

    Raises UnknownName for another framework, TrainpaceError for a version that cannot be one.
    """
    words = re.match(r"\s*([A-Za-z_]+?)(?:[\s_=-]*v?(\d[\w.+-]*))?\s*$", text)
    name = words[1].casefold() if words else text.strip()
    framework = _NAMES.get(name)
    if words is None or framework is None:
        raise UnknownName("framework", name, _NAMES, _FORMS)
    version = parse_version(words[2] or "")
    if framework == "torch" and ((words[2] and not version) or (version and version[0] >= NEWEST)):
        raise TrainpaceError(f"{text!r} names no version of torch: there are 0.4 to 2.x.", _FORMS)
    # Keras counts its versions apart, and no forecast depends on them
    return Software(framework=framework, version=() if name == "keras" else version)


def parse_version(text: str) -> tuple[int, ...]:
    """Major and minor version, and the patch where there is one, of texts such as "2.1.0a0+cu121"; () where there is none."""
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
"""Between which forecasts differ, newest first; for lists to choose from."""
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
"""Other libraries' words for the same kernels."""


def parse_attention(text: str) -> Attention:
    """An implementation of attention by its name or another library's: ``flash2``, ``flash_attention_2``, ``math``.

    Raises UnknownName for none of them.
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
