"""Traces of torch.profiler: real ones, shortened and handmade ones, and files that are not traces."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import made_traces as made
from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import pieces
from trainpace.diagnose import read_profiled
from trainpace.diagnose.trace_formats import read_kineto
from trainpace.measure import kind_of, kind_of_copy, short

PUBLIC = Path(__file__).parent / "public"
EXAMPLES = Path(__file__).parents[2] / "examples" / "traces"


def test_public_v100_trace_is_launch_bound():
    found = read_profiled(EXAMPLES / "kineto_v100.json")
    [rank] = found.ranks
    assert found.verdict == "launch"
    assert (rank.device, rank.steps, rank.told_by[:12]) == (
        "Tesla V100-DGXS-32GB",
        1,
        "ProfilerStep",
    )
    assert found.step_ms == pytest.approx(13.41)
    shares = {s.cause: s.ms for s in found.shares}
    assert math.fsum(shares.values()) == pytest.approx(13.41)
    assert shares["data"] == pytest.approx(0.725)
    assert shares["compute"] == pytest.approx(
        0.020, abs=1e-6
    )  # twelve kernels of one to three microseconds
    assert shares["host_to_device"] == pytest.approx(0.002, abs=1e-6)
    assert rank.kernels == 12
    assert found.kernels[0].name == "volta_sgemm_128x32_nt"


def test_trace_with_one_kernel_and_trailing_rank_is_read():
    trace = read_kineto(PUBLIC / "hta_one_kernel.json")
    assert (trace.rank, len(trace.kernels), len(trace.operators)) == (0, 1, 3)
    assert trace.kernels.start_us[0] - trace.kernels_launched_us[0] == 64_135
    assert kind_of(trace.names[trace.kernels.name[0]]) == "matrix"


SCRIPT = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(128, 64), torch.randn(128, 1))
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=6, repeat=1),
    on_trace_ready=lambda profiler: profiler.export_chrome_trace(sys.argv[1]),
) as profiler:
    for x, y in torch.utils.data.DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        profiler.step()
"""
"""In a process of its own: torch's profiler, stopped while it warms up again, has crashed."""


def test_trace_of_installed_torch_is_read(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "trace.json.gz"
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)], check=True, capture_output=True, timeout=300
    )
    found = read_profiled(out)
    [rank] = found.ranks
    assert (rank.steps, rank.on_device) == (6, False)
    shares = {s.cause: s.share for s in found.shares}
    assert math.fsum(shares.values()) == pytest.approx(1)
    assert shares["compute"] > 0
    assert shares["optimizer"] > 0
    assert shares["data"] > 0
    assert found.verdict in ("compute", "optimizer", "own_code", "data")
    assert any("No kernel of a GPU" in line for line in found.warnings)


@pytest.mark.parametrize("layout", [{}, {"indent": 1}])
@pytest.mark.parametrize("length", [1.5, math.nan])
def test_trace_with_any_layout_and_nan_is_read(layout, length, tmp_path):
    trace = made.trace_of(made.events_of(made.LAUNCHING, 3), rank=3, world_size=8)
    for name, dur in (('größer }, {"ph"', 1.5), ("skipped if it is NaN", length)):
        trace["traceEvents"].append(
            {"ph": "X", "cat": "cpu_op", "name": name, "ts": made.CLOCK_US, "dur": dur, "args": {}}
        )
    (tmp_path / "t.json").write_text(json.dumps(trace, ensure_ascii=False, **layout))
    found = read_kineto(tmp_path / "t.json")
    assert (found.rank, found.world_size, found.device) == (3, 8, "NVIDIA H100 80GB HBM3")
    assert (len(found.kernels), len(found.calls)) == (57, 57)
    assert len(found.operators) + found.skipped == 59
    assert 'größer }, {"ph"' in found.names


def test_names_with_broken_utf_8_are_read(tmp_path):
    whole = json.dumps(made.events_of(made.COMPUTING, 2)).encode()
    (tmp_path / "t.json").write_bytes(whole.replace(b"gemm", b"g\xffmm"))
    assert len(read_kineto(tmp_path / "t.json").kernels) == 6


def test_bare_array_of_events_is_read_as_trace(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(made.events_of(made.COMPUTING, 2)))
    assert len(read_kineto(tmp_path / "t.json").kernels) == 6


def test_impossible_events_are_skipped_and_counted(tmp_path):
    events_ = made.events_of(made.COMPUTING, 2)
    wrong = [
        {"ts": "soon"},
        {"ts": None},
        {"dur": -1},
        {"ts": 1e300},
        {"dur": float("nan")},
        {"ts": True},
    ]
    events_ += [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 1.0} | one for one in wrong
    ]
    events_ += [
        None,
        7,
        [],
        {},
        {"ph": "X"},
        {"ph": "X", "cat": 3, "name": "k"},
        {"ph": "X", "cat": "kernel", "name": {}},
    ]
    events_ += [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": made.CLOCK_US, "dur": 1, "args": args}
        for args in ([], "x", {"correlation": "1"})
    ]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events_}))
    found = read_kineto(tmp_path / "t.json")
    assert (len(found.kernels), found.skipped) == (9, 6)


GOOD = json.dumps(made.trace_of(made.events_of(made.COMPUTING, 3))).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"7",
        b"{}",
        b'{"traceEvents": 3}',
        b'{"traceEvents": []}',
        GOOD[:-40],
        GOOD[: len(GOOD) // 2],
        GOOD.replace(b'"ph"', b'"ph', 1),
        b'{"traceEvents": [' + b"[" * 100_000,
        b'{"traceEvents": [{"ts": ' + b"9" * 10_000 + b"}]}",
        b"\xff\xfe\x00",
        gzip.compress(GOOD)[:-200],
        gzip.compress(GOOD)[:-8] + b"\x00" * 8,
    ],
)
def test_files_that_are_not_traces_are_unreadable_input(content, tmp_path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UnreadableInput):
        read_kineto(tmp_path / "t.json")


def test_gzip_bomb_is_stopped_at_size_limit(tmp_path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b" " * 20_000_000))
    with pytest.raises(UnreadableInput, match="more than 1 MiB"):
        list(pieces(tmp_path / "t.json.gz", 1 << 20))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (made.GEMM, "matrix"),
        (made.ADD, "memory"),
        (made.ALL_REDUCE, "communication"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(Params)",
            "matrix",
        ),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_SE_K1", "matrix"),
        (
            "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>(Flash_fwd_params)",
            "matrix",
        ),
        ("void cudnn::ops::nchwToNhwcKernel<__half, float>", "memory"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", "memory"),
        (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16",
            "matrix",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
            "memory",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::conv_like>", "memory"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Metadata, FusedAdamMathFunctor<float>>",
            "memory",
        ),
        ("triton_poi_fused_add_mul_0", "memory"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "memory"),
        ("my_kernel", "other"),
    ],
)
def test_kinds_of_kernels_follow_names(name, kind):
    assert kind_of(name) == kind


def test_kinds_of_copies_follow_direction():
    names = (
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoH (Device -> Pageable)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "Memcpy PtoP (Device -> Device)",
    )
    assert [kind_of_copy(name) for name in names] == [
        "copy",
        "copy",
        "memory",
        "memory",
        "communication",
    ]


def test_short_kernel_names_are_distinguishable():
    assert short(made.ADD) == "vectorized_elementwise_kernel add"
    assert (
        short("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128>(P)")
        == "Kernel cutlass_80_tensorop_s1688gemm_128x128"
    )
    assert short(made.ALL_REDUCE) == "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert short("<>") == "<>"
