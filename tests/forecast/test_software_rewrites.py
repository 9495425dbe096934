"""Workloads rewritten for other software are compared with traces made under that software."""

import json

import numpy as np
import pytest

from nouns import stacked
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.software import TODAY, Rewrites, Software, parse_software
from trainpace.forecast import Forecaster, Target
from trainpace.forecast.fusion import fused as fused_by_inductor
from trainpace.forecast.software import as_run
from trainpace.workload import Variant
from trainpace.workload.trace import trace

A100 = Cluster(device=find_device("A100"))
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_head": 4,
    "n_layer": 6,
    "vocab_size": 4096,
    "n_positions": 512,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Traces of both models by (name, legacy): with current torch and as torch before 2.0 ran them."""
    pytest.importorskip("transformers")
    workloads = {}
    for name, sizes in (("gpt2", GPT2), ("llama", LLAMA)):
        path = tmp_path_factory.mktemp(name) / "config.json"
        path.write_text(json.dumps(sizes))
        for legacy in (False, True):
            variant = Variant("adamw", 512, legacy=legacy)
            workloads[name, legacy] = trace(f"transformers:{path}", ("amp", "half"), variant)
    return workloads


def forecast(workload, software=TODAY, **changes):
    e = Execution(
        **{"micro_batch": 8, "precision": "bf16", "optimizer": workload.optimizer, **changes}
    )
    return Forecaster(workload, Target(A100, software=software)).forecast(e)


def counts(workload, form):
    table = workload.forms[form].operators
    kinds = {}
    for kind, function, count in zip(table.kind, table.function, table.count, strict=True):
        kinds[kind, function] = kinds.get((kind, function), 0) + int(count)
    return kinds


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("form", "precision"), [("half", "bf16"), ("amp", "amp_bf16")])
def test_eager_attention_rewrite_matches_unfused_trace(traced, name, form, precision):
    fused, unfused = traced[name, False], traced[name, True]
    rewritten = as_run(fused, Rewrites(eager_attention=True))
    ours, theirs = counts(rewritten, form), counts(unfused, form)
    for kind in (("gemm", "bmm"), ("softmax", "_softmax"), ("softmax", "_softmax_backward_data")):
        assert ours[kind] == theirs[kind]
    assert not any(kind.startswith("attention") for kind, _ in ours)
    a, b = (
        forecast(fused, Software(attention="eager"), precision=precision),
        forecast(unfused, precision=precision),
    )
    for part in ("forward_ms", "backward_ms"):
        assert getattr(a.step, part) == pytest.approx(getattr(b.step, part), rel=0.06)
    assert a.memory.activations_gib == pytest.approx(b.memory.activations_gib, rel=0.05)
    blocks = [w.forms[form].blocks for w in (rewritten, unfused)]
    assert blocks[0].attention_saved_bytes == pytest.approx(
        blocks[1].attention_saved_bytes, rel=0.02
    )
    assert a.step.total_ms > forecast(fused, precision=precision).step.total_ms


def test_model_flops_do_not_depend_on_software(traced):
    plain, eager = (forecast(traced["gpt2", False], Software(attention=a)) for a in (None, "eager"))
    assert eager.model_flops_per_step == plain.model_flops_per_step
    assert eager.mfu < plain.mfu


def test_eager_attention_is_slower_under_parallelism_and_recomputation():
    plain, eager = stacked(), Software(attention="eager")
    for changes in ({"tp": 2, "nproc_per_node": 2}, {"activation_checkpointing": "full"}):
        cluster = Cluster(
            device=find_device("A100"), devices_per_node=changes.get("nproc_per_node", 1)
        )
        e = Execution(
            **{"micro_batch": 4, "precision": "bf16", "optimizer": plain.optimizer, **changes}
        )
        then, now = (
            Forecaster(plain, Target(cluster, software=s)).forecast(e) for s in (eager, TODAY)
        )
        assert then.step.total_ms > now.step.total_ms
        assert then.memory.allocated_gib >= now.memory.allocated_gib


def launches(workload, form="amp"):
    table = workload.forms[form].operators
    return int((table.count * table.launches)[np.array(table.phase) == "optimizer"].sum())


def test_for_loop_optimizer_rewrite_matches_its_trace(traced):
    now, then = traced["gpt2", False], traced["gpt2", True]
    assert launches(as_run(now, Rewrites(optimizer="for_loop"))) == pytest.approx(
        launches(then), rel=0.05
    )
    a, b = forecast(now, Software(optimizer="for_loop")), forecast(then)
    assert a.step.optimizer_ms == pytest.approx(b.step.optimizer_ms, rel=0.15)


def test_fused_optimizer_is_one_kernel_and_faster(traced):
    now = traced["gpt2", False]
    fused = as_run(now, Rewrites(optimizer="fused"))
    assert [
        f for f in fused.forms["amp"].operators.function if f.startswith("_f") and "rms" not in f
    ] == ["_fused_adamw_"]
    assert launches(fused) < launches(now) / 3
    # the reverse rewrite: from a fused update back to foreach
    again = as_run(fused, Rewrites(optimizer="foreach"))
    ms = [forecast(w, precision="amp_bf16").step.optimizer_ms for w in (now, again)]
    assert ms[1] == pytest.approx(ms[0], rel=0.15)
    assert 2 < ms[0] / forecast(fused, precision="amp_bf16").step.optimizer_ms < 5


def test_default_software_leaves_workload_unchanged(traced):
    now = traced["gpt2", False]
    assert as_run(now, TODAY.rewrites) is now
    assert as_run(now, Rewrites(optimizer="foreach")) is now
    assert as_run(traced["gpt2", True], parse_software("torch1.9").rewrites) is traced["gpt2", True]


def test_forecaster_switches_software_and_back(traced):
    now = traced["gpt2", False]
    first = Forecaster(now, Target(A100))
    e = Execution(micro_batch=8, precision="bf16", optimizer="adamw")
    before = first.forecast(e)
    eager = first.on(Target(A100, software=Software(attention="eager")))
    assert eager.forecast(e) == forecast(now, Software(attention="eager"))
    assert eager.on(Target(A100)).forecast(e) == before == first.forecast(e)
    assert eager.on(A100).forecast(e) == eager.forecast(
        e
    )  # passing only a cluster keeps the software


def test_old_torch_and_keras_have_more_host_overhead(traced):
    now = traced["gpt2", False]
    small = {"micro_batch": 1}
    host = [
        forecast(now, software, **small).step.host_overhead_ms
        for software in (
            TODAY,
            parse_software("keras"),
            parse_software("torch1.9"),
            parse_software("torch1.13"),
        )
    ]
    assert host[1] > 2 * host[0]
    assert host[2] > 2 * host[3]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("precision", ["bf16", "amp_bf16"])
def test_fused_and_chunked_cross_entropies_save_logits_memory(traced, name, precision):
    now = traced[name, False]
    plain, fused, wide, chunked = (
        forecast(now, Software(cross_entropy=kind), precision=precision)
        for kind in ("plain", "fused", "fused_fp32", "chunked")
    )
    assert (
        plain == forecast(now, precision=precision)
        or plain.step == forecast(now, precision=precision).step
    )
    assert fused.step.total_ms < plain.step.total_ms
    # a chunk coexists with the gradient of the head's weight and with autocast's copy of the weight
    weight = {"bf16": 2, "amp_bf16": 4 + 2}[precision] * 4096 * 256 / 2**30
    assert (
        chunked.memory.activations_gib - weight
        <= fused.memory.activations_gib
        < plain.memory.activations_gib
    )
    # vocabulary 4,096, 8 x 512 tokens: saves a log-softmax and two gradients in fp32
    logits_gib = 4096 * 8 * 512 * 4 / 2**30
    assert plain.memory.activations_gib - fused.memory.activations_gib <= 3.01 * logits_gib
    # one of three fp32 tensors remains, plus the 16-bit gradient in the backward pass
    assert (
        0.8 * logits_gib
        < wide.memory.activations_gib - fused.memory.activations_gib
        < 1.01 * logits_gib
    )
    assert (
        1.4 * logits_gib
        < plain.memory.activations_gib - wide.memory.activations_gib
        < 1.6 * logits_gib
    )
    assert fused.step.total_ms < wide.step.total_ms < plain.step.total_ms


def test_uncompiled_loss_is_not_fused(traced):
    now, outside = traced["gpt2", False], Software(cross_entropy="uncompiled")
    eager = [
        forecast(now, software, precision="amp_bf16").step.total_ms for software in (TODAY, outside)
    ]
    assert eager[0] == eager[1]
    inside, apart = (
        forecast(now, software, precision="amp_bf16", compile=True).step.total_ms
        for software in (TODAY, outside)
    )
    assert inside < apart < eager[0]
    table = as_run(now, Rewrites(cross_entropy="uncompiled")).forms["amp"].operators
    left, loss = fused_by_inductor(table), np.char.find(table.function, "log_softmax") >= 0
    assert loss.sum() == 2
    assert not left.joined[loss].any()
    assert (left.traffic[loss] == 1).all()


def test_older_inductor_fuses_less(traced):
    now = traced["gpt2", False]
    old, new = (
        {
            on: forecast(now, Software(version=(2, minor), attention="flash2"), compile=on).step
            for on in (False, True)
        }
        for minor in (1, 3)
    )
    assert old[False] == new[False]
    assert old[True].computing_ms > new[True].computing_ms
    assert old[True].host_overhead_ms > new[True].host_overhead_ms


def test_chunked_loss_splits_head_matmuls_into_chunks(traced):
    now, chunked = (
        w.forms["half"].operators
        for w in (
            traced["llama", False],
            as_run(traced["llama", False], Rewrites(cross_entropy="chunked")),
        )
    )
    head = [
        [
            (int(o.count[i]), float((o.flops[i] * o.count[i]).sum()))
            for i in range(len(o))
            if o.kind[i] == "gemm" and 4096 in o.dims[i, :4].sum(axis=1)
        ]
        for o in (now, chunked)
    ]
    assert [n for n, _ in head[1]] == [
        16 * n for n, _ in head[0]
    ]  # vocabulary 4,096 / hidden size 256
    assert [flops for _, flops in head[1]] == pytest.approx([flops for _, flops in head[0]])


def test_chunked_loss_keeps_head_gradients_and_one_chunk(traced):
    plain = traced["llama", False]
    half, amp = (
        as_run(plain, Rewrites(cross_entropy="chunked")).forms[form].blocks
        for form in ("half", "amp")
    )
    before = plain.forms["half"].blocks
    weight, tokens = 4096 * 256, 512
    saved = (
        before.after_saved_bytes[0] + 2 * weight,
        before.after_saved_bytes[1] - 4 * tokens * 4096 + 2 * tokens * 256,
    )
    assert half.after_saved_bytes == pytest.approx(saved)
    assert (
        half.after_working_bytes[1]
        <= before.after_working_bytes[1] - (8 - 2 / 16) * tokens * 4096 + 1
    )
    # under autocast the weight's gradient is in fp32, and the weight is cast for each chunk
    assert amp.after_saved_bytes[0] - plain.forms["amp"].blocks.after_saved_bytes[
        0
    ] == pytest.approx(4 * weight)
    assert amp.after_working_bytes[0] >= 2 * weight
