"""Traces of real models: parameters, FLOPs, memory, precisions and errors."""

import numpy as np
import pytest
import torch
from torch import nn

from nouns import at_peak
from trainpace.core.errors import TrainpaceError, UnknownName, UserCodeError
from trainpace.workload import Variant, at_batch, specs
from trainpace.workload.specs import build_task
from trainpace.workload.task import Task, image_task
from trainpace.workload.trace import trace, trace_task

PARAMETERS = {  # as torchvision documents them; MobileNet v1: the trainable ones of Keras
    "vgg11": 132863336,
    "vgg13": 133047848,
    "vgg16": 138357544,
    "vgg19": 143667240,
    "resnet18": 11689512,
    "resnet34": 21797672,
    "resnet50": 25557032,
    "resnet101": 44549160,
    "resnet152": 60192808,
    "mobilenet_v1": 4231976,
    "mobilenet_v2": 3504872,
}
GMACS = {
    "vgg16": 15.47,
    "resnet50": 4.09,
    "resnet18": 1.81,
    "mobilenet_v1": 0.569,
    "mobilenet_v2": 0.30,
}
"""Multiply-adds of one 224 x 224 image forward, as torchvision documents them; MobileNet v1: table 4 of its paper."""


def calling(model, batch):
    return model(batch)


def flops(workload, batch, phase, form="fp32"):
    table = workload.forms[form].operators
    rows = np.array(
        [
            p == phase and (k.startswith(("gemm", "conv", "attention")))
            for p, k in zip(table.phase, table.kind, strict=True)
        ]
    )
    return float((at_batch(table.flops, batch) * table.count)[rows].sum())


@pytest.mark.parametrize("name", PARAMETERS)
def test_classic_models_have_published_parameter_counts(name):
    with torch.device("meta"):
        assert sum(p.numel() for p in specs.MODELS[name]().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", GMACS)
def test_classic_models_have_published_flops(name):
    workload = trace(name)
    forward = flops(workload, 1, "forward")
    assert forward == pytest.approx(2e9 * GMACS[name], rel=0.02)
    # backward: twice the forward, less the gradient of the image
    assert flops(workload, 1, "backward") == pytest.approx(2 * forward, rel=0.06)


def linear_task(batch_first=True, model=None, loss=None):
    model = model or nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    criterion = nn.CrossEntropyLoss()
    return Task(
        "small",
        model,
        calling,
        loss or (lambda m, b: criterion(m(b[0]), b[1])),
        lambda n: (torch.randn(n, 64), torch.randint(0, 10, (n,))),
        None,
        "a vector",
    )


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_affine_coefficients_are_exact_for_any_batch(batch):
    workload = trace_task(linear_task())
    assert flops(workload, batch, "forward") == 2 * batch * (64 * 128 + 128 * 10)


def test_traced_memory_matches_manual_count():
    workload = trace_task(linear_task(), variant=Variant("adamw"))
    memory = workload.forms["fp32"].memory
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert memory.parameter_bytes == 4 * parameters
    assert memory.optimizer_bytes == 8 * parameters
    gradient, activation = at_peak(memory, 100_000)
    # saved for backward per sample: 64 inputs are the caller's, 128 hidden, 10 logits and their log-softmax; the peak
    # adds the gradients that flow
    assert 4 * 100_000 * (128 + 20) <= gradient + activation <= 4 * 100_000 * (3 * 128 + 40)


def test_sgd_without_momentum_has_no_state():
    assert (
        trace_task(linear_task(), variant=Variant("sgd")).forms["fp32"].memory.optimizer_bytes == 0
    )


def test_precision_forms_differ_as_on_cuda():
    task = linear_task(
        model=nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10))
    )
    workload = trace_task(task, ("fp32", "amp", "half"), Variant("sgd"))
    table = {form: workload.forms[form].operators for form in workload.forms}

    def halves(form, kind):
        return {
            bool(h) for h, k in zip(table[form].half, table[form].kind, strict=True) if k == kind
        }

    assert halves("fp32", "gemm") == {False}
    assert halves("amp", "gemm") == {True}
    assert halves("half", "gemm") == {True}
    assert True not in halves("amp", "softmax")  # autocast keeps the loss in fp32
    assert sum(table["amp"].count) > sum(table["fp32"].count)  # the casts
    assert (
        workload.forms["amp"].memory.parameter_bytes
        == 2 * workload.forms["half"].memory.parameter_bytes
    )
    assert (
        workload.forms["amp"].memory.parameter_bytes
        == workload.forms["fp32"].memory.parameter_bytes
    )


def test_model_can_disable_autocast_by_device_type():
    """transformers 4.45 does so for rotary positions; torch's autocast does not support the meta device."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast(device_type=x.device.type, enabled=False):
                return self.linear(x)

    before = torch.autocast.__init__
    task = image_task("autocast", nn.Sequential(nn.Flatten(), Model()), (1, 2, 4), 8)
    assert "gemm" in trace_task(task, ("fp32",), Variant("sgd")).forms["fp32"].operators.kind
    assert torch.autocast.__init__ is before


def test_autocast_dtypes_match_torch():
    """Compared with torch's own CPU autocast, for the operators that it shares with CUDA."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    seen = []
    hooks = [m.register_forward_hook(lambda m, i, o: seen.append(o.dtype)) for m in model]
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 8, 8))
    truth = list(seen)
    seen.clear()
    task = Task(
        "small",
        model,
        calling,
        lambda m, b: m(b).sum(),
        lambda n: torch.randn(n, 3, 8, 8),
        None,
        "an image",
    )
    trace_task(task, ("amp",), Variant("sgd"))  # the trace runs a copy of the model, hooks included
    for hook in hooks:
        hook.remove()
    assert seen[: len(truth)] == truth


def test_fused_attention_and_dropout_are_traced():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    task = Task(
        "encoder",
        layer,
        calling,
        lambda m, b: m(b).sum(),
        lambda n: torch.randn(n, 16, 32),
        None,
        "16 tokens",
    )
    table = trace_task(task, ("amp",), Variant("sgd")).forms["amp"].operators
    assert "attention" in table.kind
    assert "attention_backward" in table.kind
    row = table.kind.index("attention")
    assert at_batch(table.dims, 3)[row, :6].tolist() == [3, 4, 16, 16, 8, 0]


@pytest.mark.parametrize("shape", [(16, 8), (4, 3, 16, 8)])
def test_attention_without_four_dimensions_is_not_fused(shape):
    layer = nn.Linear(8, 8)
    task = Task(
        "blocks",
        layer,
        calling,
        lambda m, b: nn.functional.scaled_dot_product_attention(m(b), b, b).sum(),
        lambda n: torch.randn(n, *shape),
        None,
        "blocks",
    )
    kinds = trace_task(task, variant=Variant("sgd")).forms["fp32"].operators.kind
    assert "attention" not in kinds
    assert "softmax" in kinds


def test_cached_tensors_are_not_counted_per_step():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)
            self.positions = None

        def forward(self, x):
            if self.positions is None:
                self.positions = torch.arange(10).float().cos().sin()
            return self.layer(x) + self.positions

    plain, cached = (trace_task(linear_task(model=m)) for m in (nn.Linear(64, 10), Cached()))
    tables = [w.forms["fp32"].operators for w in (plain, cached)]
    counts = [table.count[table.launches > 0].sum() for table in tables]
    assert counts[1] == counts[0] + 1  # the addition


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_created_on_named_device_are_traced(device):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = nn.Linear(64, 10), nn.Embedding(10, 10)

        def forward(self, x):
            places = torch.arange(10, device=device)
            return (
                self.layer(x.to(device))
                + self.table(places).sum()
                + torch.zeros(len(x), 10).to(torch.device(device))
            )

    def without(model, batch):
        return model.layer(batch[0]).sum()

    named = trace_task(
        linear_task(model=Positions(), loss=lambda model, batch: model(batch[0]).sum())
    )
    plain = trace_task(linear_task(model=Positions(), loss=without))
    assert flops(named, 7, "forward") == pytest.approx(flops(plain, 7, "forward"))


def test_foreign_weights_in_loss_are_rejected():
    elsewhere = nn.Linear(64, 10)
    with pytest.raises(TrainpaceError, match="weights of a model"):
        trace_task(linear_task(loss=lambda _, batch: elsewhere(batch[0]).sum()))


def test_single_batch_trace_allows_non_affine_loss():
    def contrastive(model, batch):
        z = model(batch[0])
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))

    task = linear_task(loss=contrastive)
    workload = trace_task(task, only_batch=6)
    assert workload.only_batch == 6
    products = 2 * 6 * (64 * 128 + 128 * 10 + 6 * 10)
    assert flops(workload, 6, "forward") == products
    assert workload.sample_bytes == 64 * 4 + 8
    affine, own = trace_task(linear_task()), trace_task(linear_task(), only_batch=6)
    for phase in ("forward", "backward"):
        assert flops(own, 6, phase) == flops(affine, 6, phase)
    assert own.forms["fp32"].memory.parameter_bytes == affine.forms["fp32"].memory.parameter_bytes


def test_traced_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.out = nn.Linear(16, 100, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(self.embed(x))

    task = Task(
        "tied",
        Tied(),
        calling,
        lambda m, b: nn.functional.cross_entropy(m(b).flatten(0, 1), b.flatten()),
        lambda n: torch.randint(0, 100, (n, 8)),
        None,
        "8 tokens",
    )
    workload = trace_task(task)
    assert workload.parameters == 1600
    assert workload.forms["fp32"].memory.parameter_bytes == 6400


def test_frozen_parameters_have_no_gradient():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    all_flops = flops(trace_task(linear_task(model=model)), 1, "backward")
    model[0].requires_grad_(False)
    workload = trace_task(linear_task(model=model))
    assert workload.trainable_parameters == 1290
    assert flops(workload, 1, "backward") < all_flops


def test_non_affine_loss_is_rejected():
    def contrastive(model, batch):
        z = model(batch[0])
        return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device))

    with pytest.raises(TrainpaceError, match="not affine in the batch size"):
        trace_task(linear_task(loss=contrastive))


def test_value_dependent_model_error_suggests_measure():
    def peeking(model, batch):
        out = model(batch[0]).sum()
        return out if out.item() > 0 else -out

    with pytest.raises(UserCodeError, match="values") as caught:
        trace_task(linear_task(loss=peeking))
    assert "measure" in str(caught.value)


def test_raising_model_gives_one_line_error():
    def broken(model, batch):
        return model(batch[0][:, :3])

    with pytest.raises(UserCodeError) as caught:
        trace_task(linear_task(loss=broken))
    assert "\n" not in str(caught.value)
    assert "test_trace.py line" in str(caught.value)


def test_non_scalar_loss_is_rejected():
    with pytest.raises(TrainpaceError, match="Return one number"):
        trace_task(linear_task(loss=lambda model, batch: model(batch[0])))


@pytest.mark.parametrize("spec", ["resnet51", "torchvision:", "keras:vgg16", "", ":", "vgg"])
def test_unknown_model_specs_are_rejected(spec):
    with pytest.raises((UnknownName, TrainpaceError)):
        build_task(spec)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adam", "adamw"])
def test_every_optimizer_is_traced(optimizer):
    workload = trace_task(linear_task(), variant=Variant(optimizer))
    assert workload.optimizer == optimizer
    assert "optimizer" in workload.forms["fp32"].operators.phase


def test_tracing_does_not_change_user_optimizer():
    task = linear_task()
    own = torch.optim.AdamW(task.model.parameters())
    workload = trace_task(task._replace(optimizer=own))
    assert workload.optimizer == "adamw"
    assert workload.forms["fp32"].memory.optimizer_bytes > 0
    assert len(own.state) == 0
    assert all(p.device.type == "cpu" and p.grad is None for p in task.model.parameters())
