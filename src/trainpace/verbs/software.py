"""What a request says of the software that runs a step."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec.structs import replace

from trainpace.core.errors import Contradiction
from trainpace.core.software import (
    ATTENTIONS,
    TODAY,
    CrossEntropy,
    Fp8Recipe,
    OptimizerImplementation,
    Software,
    parse_attention,
    parse_software,
)
from trainpace.verbs.request import Field, Request, Unit


def _checked(text: str) -> str:
    parse_software(text)
    return text


SOFTWARE = Unit("software", _checked)
ATTENTION = Unit("kernels", parse_attention)
SoftwareName = Annotated[
    str | None,
    Field(
        "Framework and version: torch2.8, torch1.9, tensorflow2.4, keras, jax.  [default: PyTorch"
        " of today]",
        SOFTWARE,
        metavar="NAME",
    ),
]
AttentionName = Annotated[
    str | None,
    Field(
        f"Attention's kernels: {', '.join(ATTENTIONS)}.  [default: what the software takes on the"
        " card]",
        ATTENTION,
        metavar="KERNELS",
    ),
]
OptimizerKernels = Annotated[
    OptimizerImplementation | None,
    Field(
        "The optimizer's kernels: fused, several tensors a kernel, or one by one.  [default:"
        " foreach]"
    ),
]
CrossEntropyKernels = Annotated[
    CrossEntropy | None,
    Field(
        "Kernels of a vocabulary's loss: fused, or fused_fp32 and chunked as Liger's in"
        " transformers; cut cross-entropy; vocab_parallel as Megatron's; uncompiled: outside"
        " torch.compile.  [default: plain]"
    ),
]
Fp8Scales = Annotated[Fp8Recipe | None, Field("What shares a scale in FP8.  [default: per_tensor]")]


def software_of(request: Request) -> Software:
    """The software that a request with some of these fields says. Raises Contradiction for torch.compile before torch 2.0."""
    fields = {
        "attention": "attention",
        "optimizer": "optimizer_implementation",
        "cross_entropy": "cross_entropy",
        "fp8_recipe": "fp8_recipe",
    }
    given: dict[str, Any] = {
        name: value for name, field in fields.items() if (value := getattr(request, field, None))
    }
    name: str | None = getattr(request, "software", None)
    software = replace(parse_software(name) if name else TODAY, **given)
    if software.is_before_fusion and getattr(request, "compile", False):
        raise Contradiction(
            f"torch.compile came with torch 2.0, and `software` is {name}.",
            "Leave one of them out.",
        )
    return software


def runs_anyway(software: Software) -> dict[str, bool]:
    """The fields of `Execution` that such software turns on without being asked to."""
    settings = {"compile": software.compiles, "channels_last": software.channels_last}
    return {name: True for name, on in settings.items() if on}
