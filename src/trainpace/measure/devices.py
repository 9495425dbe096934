"""Kinds of devices: whether this torch has one, what it is called, and waiting for its work."""

from typing import Any

import torch

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import Precision

KINDS = {
    "cuda": "Install a build of torch for CUDA, or for ROCm on an AMD GPU",
    "xpu": "Install a build of torch for Intel GPUs",
    "mps": "MPS is for Apple silicon under macOS",
}
"""Kinds of devices that torch brings along beside the CPU, and what to do where this torch has none."""


def accelerator_here() -> str | None:
    """The kind of accelerator that this torch was built for and finds a device of."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None and torch.accelerator.is_available() else None


def check_device(kind: str) -> None:
    """Raises TrainpaceError unless this torch has a device of that kind, with what to do about it."""
    if kind == "cpu" or accelerator_here() == kind:
        return
    if kind not in KINDS:
        raise UnknownName("device", kind, ("cpu", *KINDS))
    here = accelerator_here()
    instead = f"use --device {here}, which is here" if here else "use --device cpu"
    raise TrainpaceError(
        f"this torch sees no {kind.upper()} device.", f"{KINDS[kind]}; or {instead}."
    )


def set_up_device(kind: str, precision: Precision) -> None:
    """Let products and convolutions use TF32 in every precision but fp32, and convolutions alone in torch_fp32.

    Raises TrainpaceError where this torch or this kind of device does not have the precision.
    """
    check_device(kind)
    if precision in ("tf32", "fp8") and kind != "cuda":
        raise TrainpaceError(
            f"{precision} is for CUDA GPUs.", "Measure fp32, or a format of 16 bits."
        )
    if precision == "fp8":
        raise TrainpaceError(
            "measuring fp8 needs an engine of its own.", "Measure amp_bf16 or bf16."
        )
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision not in ("fp32", "torch_fp32")


def count_devices(kind: str) -> int:
    """How many devices of that kind this process can use; 1 for the CPU."""
    return (
        1
        if kind == "cpu"
        else torch.accelerator.device_count()
        if accelerator_here() == kind
        else 0
    )


def use_device(kind: str, index: int) -> None:
    """Make one device of that kind the one that this process trains on. Nothing on a CPU."""
    if kind != "cpu":
        torch.accelerator.set_device_index(index)


def collective_backend(kind: str) -> str:
    """torch.distributed's backend for exchanges between devices of that kind: gloo, nccl (also of ROCm), xccl.

    Raises TrainpaceError where no backend is known for it, as for MPS.
    """
    try:
        return str(torch.distributed.get_default_backend_for_device(kind))
    except ValueError:
        raise TrainpaceError(
            f"torch has no library for exchanges between {kind} devices.", "Train on one of them."
        ) from None


def synchronize(kind: str) -> None:
    """Wait until the device in use has done all of its work."""
    if kind != "cpu":
        torch.accelerator.synchronize()


def finish_stream() -> None:
    """Wait until the current stream of the accelerator in use has done all of its work; other streams go on."""
    torch.accelerator.current_stream().synchronize()


def is_capturing(kind: str) -> bool:
    """Whether the device's present stream records a graph, during which nobody may wait for it."""
    if kind == "cpu":
        return False
    capturing = getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def in_use() -> str:
    """The kind of accelerator that this process has begun to use; "cpu" before, and where there is none.

    Asking does not begin it: a script that only imports torch must not get a context on the device from being watched.
    """
    kind = accelerator_here()
    if kind is None:
        return "cpu"
    module: Any = torch.get_device_module(kind)
    begun = getattr(module, "is_initialized", None)
    if begun is None:  # as of MPS, whose own memory tells whether a tensor was put there
        allocated = getattr(module, "current_allocated_memory", None)
        return kind if allocated is None or allocated() > 0 else "cpu"
    return kind if begun() else "cpu"


def device_name(kind: str) -> str:
    """What the device in use calls itself; "" on a CPU, and where its kind does not say."""
    if kind == "cpu":
        return ""
    if kind == "mps":  # its name is the whole chip's, which the CPU has too
        named = getattr(torch.backends.mps, "get_name", None)  # from torch 2.8 on
        return f"{named()} GPU" if named is not None else "Apple GPU"
    named = getattr(torch.get_device_module(kind), "get_device_name", None)
    return str(named()) if named is not None else ""


def driver_id(kind: str) -> str:
    """The UUID by which the driver knows the device in use, "" where its kind has none. It goes into no record."""
    if kind == "cpu":
        return ""
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    if properties is None:
        return ""
    return str(getattr(properties(torch.accelerator.current_device_index()), "uuid", ""))


def versions(kind: str) -> dict[str, str]:
    """Names and versions of the device and its libraries, as a measurement's environment holds them."""
    if kind == "cpu":
        return {}
    found: dict[str, Any] = {"gpu": device_name(kind) or None}
    if kind == "cuda":
        toolkit = {"rocm": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
        found |= {**toolkit, "cudnn": torch.backends.cudnn.version()}
    if kind == "xpu":
        found["oneapi"] = torch.version.xpu
    return {name: str(value) for name, value in found.items() if value is not None}
