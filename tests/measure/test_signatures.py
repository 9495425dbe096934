"""CUDA code that no test can run, checked against the signatures of torch.cuda and NVML.

A missing name or argument fails.
"""

from types import SimpleNamespace
from unittest.mock import create_autospec

import pynvml
import pytest
import torch

from trainpace import measure as accelerator
from trainpace.core.errors import TrainpaceError
from trainpace.core.worker import is_out_of_memory
from trainpace.measure import device_in
from trainpace.measure.gpus import detect_gpus

GIB = 2**30


@pytest.fixture
def cuda(monkeypatch):
    """Fake torch.cuda and torch.accelerator with one GPU. They accept only the arguments of the real functions."""
    card = create_autospec(torch.cuda)
    card.is_initialized.return_value = True
    card.get_device_name.return_value = "NVIDIA A100-SXM4-80GB"
    card.max_memory_allocated.return_value = 3 * GIB
    card.max_memory_reserved.return_value = 4 * GIB
    card.memory_reserved.return_value = 2 * GIB
    card.memory_stats.return_value = {"num_alloc_retries": 5}
    now = create_autospec(torch.accelerator)
    now.current_accelerator.return_value = torch.device("cuda")
    now.is_available.return_value = True
    now.device_count.return_value = 8
    now.current_device_index.return_value = 3
    event = create_autospec(torch.Event)
    event.return_value.elapsed_time.return_value = 12.5
    monkeypatch.setattr(
        torch,
        "get_device_module",
        create_autospec(torch.get_device_module, side_effect=lambda _: card),
    )
    monkeypatch.setattr(torch, "accelerator", now)
    monkeypatch.setattr(torch, "Event", event)
    return SimpleNamespace(card=card, now=now, event=event)


def test_accelerator_calls_existing_functions(cuda):
    accelerator.check_device("cuda")
    accelerator.set_up_device("cuda", "amp_bf16")
    accelerator.use_device("cuda", 3)
    cuda.now.set_device_index.assert_called_once_with(3)
    assert accelerator.in_use() == "cuda"
    assert accelerator.count_devices("cuda") == 8
    assert accelerator.versions("cuda")["gpu"] == "NVIDIA A100-SXM4-80GB"
    meter = accelerator.MemoryMeter("cuda")
    cuda.card.reset_peak_memory_stats.assert_called_once_with()
    assert meter.peak_gib() == (3.0, 4.0)
    assert accelerator.reserved_gib("cuda") == 2.0
    assert accelerator.allocator_retries("cuda") == 5
    cuda.card.get_device_properties.return_value = SimpleNamespace(uuid="f00d")
    assert accelerator.driver_id("cuda") == "f00d"
    cuda.card.get_device_properties.assert_called_once_with(3)  # not the machine's first card
    assert accelerator.driver_id("cpu") == ""


def test_step_clock_uses_device_events(cuda):
    clock = accelerator.StepClock("cuda")
    clock.start_step()
    clock.mark()
    assert cuda.event.call_args.args == ("cuda",)
    assert cuda.event.call_args.kwargs == {"enable_timing": True}
    cuda.now.synchronize.assert_not_called()  # the host runs ahead
    clock.settle()
    cuda.now.synchronize.assert_called_once_with()
    assert clock.spans_ms == [[12.5]]


@pytest.fixture
def tf32():
    """Yield a function that reads the TF32 switches of convolutions and matmuls. Restore the switches afterwards."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    yield lambda: (convolutions.allow_tf32, products.allow_tf32)
    convolutions.allow_tf32, products.allow_tf32 = before


def test_fp32_precision_disables_tf32(cuda, tf32):
    switches = {}
    for precision in ("fp32", "torch_fp32", "tf32", "amp_bf16"):
        accelerator.set_up_device("cuda", precision)
        switches[precision] = tf32()
    assert switches == {
        "fp32": (False, False),
        "torch_fp32": (True, False),
        "tf32": (True, True),
        "amp_bf16": (True, True),
    }


def test_out_of_memory_is_recognized_by_exception_class():
    """Allocators of other packages have their own messages."""
    assert is_out_of_memory(torch.OutOfMemoryError("allocation of 4096 bytes failed"))
    assert not is_out_of_memory(RuntimeError("allocation of 4096 bytes failed"))


def test_device_check_does_not_initialize_cuda(cuda):
    cuda.card.is_initialized.return_value = False
    assert accelerator.in_use() == "cpu"
    cuda.card.init.assert_not_called()


def test_missing_device_names_available_one(cuda):
    with pytest.raises(TrainpaceError, match="sees no XPU device") as refused:
        accelerator.check_device("xpu")
    assert "use --device cuda, which is here" in refused.value.hint


def test_missing_device_hint_names_torch_build():
    with pytest.raises(TrainpaceError, match="sees no CUDA device") as refused:
        accelerator.check_device("cuda")
    assert (
        refused.value.hint
        == "Install a build of torch for CUDA, or for ROCm on an AMD GPU; or use --device cpu."
    )


def test_nvml_queries_match_documented_signatures():
    """Every query goes through the real signatures; each answer has the documented type."""
    nvml = create_autospec(pynvml)
    for name in (
        "NVMLError",
        "NVMLError_LibraryNotFound",
        "NVMLError_DriverNotLoaded",
        "NVML_TEMPERATURE_GPU",
    ):
        setattr(nvml, name, getattr(pynvml, name))
    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")):
            getattr(nvml, name).return_value = 1
    nvml.nvmlDeviceGetName.return_value = "NVIDIA A100-SXM4-80GB"
    nvml.nvmlSystemGetDriverVersion.return_value = "580.65.06"
    nvml.nvmlSystemGetCudaDriverVersion.return_value = 13000
    nvml.nvmlDeviceGetMemoryInfo.return_value = SimpleNamespace(
        total=80 * GIB, free=70 * GIB, used=10 * GIB
    )
    nvml.nvmlDeviceGetComputeRunningProcesses.return_value = [SimpleNamespace(pid=1)]
    nvml.nvmlDeviceGetMigMode.return_value = [0, 0]
    nvml.nvmlDeviceGetCurrentClocksEventReasons.return_value = 0x4  # power cap
    gpus, problem = detect_gpus(nvml)
    assert problem is None
    (gpu,) = gpus
    assert (gpu.name, gpu.memory_gib) == ("NVIDIA A100-SXM4-80GB", 80)
    assert (gpu.driver, gpu.cuda, gpu.other_processes, gpu.mig) == ("580.65.06", "13.0", 1, False)
    assert gpu.throttled_by
    # A name that NVML lacks would be skipped silently.
    assert [field for field in gpu.__struct_fields__ if getattr(gpu, field) is None] == []


@pytest.fixture
def mps(monkeypatch):
    """Fake torch.mps of Apple silicon, which has no is_initialized, no device names and no peak memory."""
    module = create_autospec(torch.mps)
    module.current_allocated_memory.return_value = 0
    now = create_autospec(torch.accelerator)
    now.current_accelerator.return_value = torch.device("mps")
    now.is_available.return_value = True
    now.device_count.return_value = 1
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "accelerator", now)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2 Max")
    return module


def test_mps_device_memory_and_name_are_read(mps, monkeypatch):
    assert accelerator.in_use() == "cpu"  # a script that only imports torch
    mps.current_allocated_memory.return_value = 4096
    assert accelerator.in_use() == "mps"
    assert accelerator.versions("mps") == {
        "gpu": "Apple M2 Max GPU"
    }  # not the name that its CPU has too
    assert device_in({"cpu": "Apple M2 Max", **accelerator.versions("mps")}) == "Apple M2 Max GPU"
    assert accelerator.driver_id("mps") == ""
    assert accelerator.MemoryMeter("mps").peak_gib() == (None, None)
    assert accelerator.allocator_retries("mps") == 0
    monkeypatch.delattr(torch.backends.mps, "get_name")  # an older torch
    assert accelerator.device_name("mps") == "Apple GPU"
