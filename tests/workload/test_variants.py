"""The same model traced for less than a step, older software, other sizes, or with recomputation."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from nouns import at_peak
from trainpace.workload import Variant, at_batch
from trainpace.workload.task import Task
from trainpace.workload.trace import trace, trace_task

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "vocab_size": 100,
}


def task(model, shape=(3, 16, 16)):
    return Task(
        "small",
        model,
        lambda m, b: m(b),
        lambda m, b: m(b).float().sum(),
        lambda n: torch.randn(n, *shape),
        None,
        "an image",
    )


def operators(workload, form="fp32"):
    return workload.forms[form].operators


def flops(table, phase, batch=4):
    rows = np.array(table.phase) == phase
    return float((at_batch(table.flops, batch) * table.count)[rows].sum())


def test_each_mode_traces_only_its_phases():
    whole, passes, forward = (
        trace("resnet18", variant=Variant(mode=mode))
        for mode in ("train", "forward_backward", "inference")
    )
    assert set(operators(whole).phase) == {"forward", "backward", "optimizer"}
    assert set(operators(passes).phase) == {"forward", "backward"}
    assert set(operators(forward).phase) == {"forward"}
    assert passes.forms["fp32"].memory.optimizer_bytes == 0
    assert "native_batch_norm_inference" in operators(forward).function
    assert "native_batch_norm" in operators(whole).function
    memory = [at_peak(w.forms["fp32"].memory, 8)[1] for w in (forward, passes)]
    assert memory[0] < 0.5 * memory[1]


def test_legacy_variant_disables_fused_attention_and_foreach_optimizers(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    today, then = (
        operators(
            trace(f"transformers:{path}", ("half",), Variant("adamw", 32, legacy=legacy)), "half"
        )
        for legacy in (False, True)
    )
    assert "attention" in today.kind
    assert "attention" not in then.kind
    assert "softmax" in then.kind
    launches = [
        int((table.count * table.launches)[np.array(table.phase) == "optimizer"].sum())
        for table in (today, then)
    ]
    assert launches[1] > 3 * launches[0]


def test_image_size_scales_flops():
    small, large = (trace("resnet18", variant=Variant(image_size=side)) for side in (112, 224))
    assert flops(operators(large), "forward") == pytest.approx(
        4 * flops(operators(small), "forward"), rel=0.1
    )
    assert large.sample_bytes == 3 * 224 * 224 * 4 + 8
    assert large.batch_tensors == 2  # images and labels


def test_keras_vgg_parameters_grow_with_image_size():
    small, large = (
        trace("vgg11_keras", variant=Variant(image_size=side)).parameters for side in (64, 224)
    )
    assert (
        small == 38_491_496
    )  # 9.2 M in convolutions, 2048 x 4096 + 4096 x 4096 + 4096 x 1000 and their biases
    assert large == trace("vgg11").parameters


def test_checkpointing_repeats_forward_and_saves_memory(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2 | {"n_layer": 6}))
    plain, saving = (
        trace(f"transformers:{path}", ("half",), Variant("adamw", 128, checkpointing=on))
        for on in (False, True)
    )
    assert saving.checkpointed
    backward = [flops(operators(w, "half"), "backward") for w in (plain, saving)]
    assert backward[0] < backward[1] <= backward[0] + flops(operators(plain, "half"), "forward")
    assert at_peak(saving.forms["half"].memory, 8)[1] < at_peak(plain.forms["half"].memory, 8)[1]
    forward = [flops(operators(w, "half"), "forward") for w in (plain, saving)]
    assert forward[1] == pytest.approx(
        forward[0], rel=0.01
    )  # without the copies of a cache of keys


def test_own_memory_format_of_model_is_traced():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8)

        def forward(self, x):
            y = self.first(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            return self.second(y)

    table = operators(trace_task(task(Turned()), variant=Variant("sgd")))
    rows = zip(table.kind, table.dims[:, 1].sum(1), table.dims[:, 15].sum(1), strict=True)
    assert {(int(groups), int(last)) for kind, groups, last in rows if kind == "conv"} == {
        (1, 0),
        (8, 1),
    }


def test_convolution_bias_views_and_modules_have_own_rows():
    with_bias, without = (
        operators(
            trace_task(
                task(nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.Flatten())),
                variant=Variant("sgd"),
            )
        )
        for bias in (True, False)
    )
    assert with_bias.function.count("conv_bias") == without.function.count("conv_bias") + 1
    host = {
        kind: int(count)
        for kind, count in zip(without.kind, without.count, strict=True)
        if kind in ("view", "module")
    }
    assert host["module"] == 2
    assert host["view"] >= 1
    assert (without.launches[np.isin(without.kind, ("view", "module"))] == 0).all()


class _Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        q = self.layer(x).view(x.shape[0], 8, 2, 8).transpose(1, 2)
        return nn.functional.dropout(
            nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout), 0.1
        )


def _functions(dropout, **variant):
    task = Task(
        "attention",
        _Attention(dropout),
        lambda m, b: m(b),
        lambda m, b: m(b).mean(),
        lambda n: torch.randn(n, 8, 16),
        None,
        "",
    )
    operators = (
        trace_task(task, ("fp32",), Variant(optimizer="adamw", **variant)).form("fp32").operators
    )
    return set(operators.function), set(operators.kind)


def test_cpu_variant_traces_cpu_operators():
    functions, kinds = _functions(0.0)
    assert {"native_dropout", "_foreach_addcdiv_"} <= functions
    assert "attention" in kinds
    functions, kinds = _functions(0.0, cpu=True)
    assert {"bernoulli_", "addcdiv_"} <= functions
    assert not {
        name for name in functions if name.startswith("_foreach") or name == "native_dropout"
    }
    assert "attention" in kinds
    functions, kinds = _functions(0.2, cpu=True)
    assert "attention" not in kinds
    assert "bmm" in functions
