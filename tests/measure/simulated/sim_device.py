"""Python side of the simulated accelerator. Torch loads it automatically: sim_device-0.dist-info declares `load` as a backend."""

import contextlib
import os
import sys
from types import SimpleNamespace

import torch

initialized = False


def load() -> None:
    global initialized
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(os.environ["SIM_LIBRARY"])
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    initialized = True


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return initialized


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: int) -> None:
    pass


def device(index: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def get_device_name() -> str:
    return os.environ.get("SIM_NAME", "Simulated accelerator")


def get_device_properties(index: int) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), uuid=os.environ.get("SIM_UUID", "sim"))


def synchronize() -> None:
    torch.accelerator.synchronize()


def memory_stats() -> dict[str, int]:
    return dict(torch.accelerator.memory_stats())


def memory_allocated() -> int:
    return torch.accelerator.memory_allocated()


def memory_reserved() -> int:
    return torch.accelerator.memory_reserved()


def max_memory_allocated() -> int:
    return torch.accelerator.max_memory_allocated()


def max_memory_reserved() -> int:
    return torch.accelerator.max_memory_reserved()


def reset_peak_memory_stats() -> None:
    torch.accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    pass


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
