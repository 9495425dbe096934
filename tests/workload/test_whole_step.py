"""Custom steps that update by themselves: every pass is counted in its phase, and the user's models stay unchanged."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.workload import Variant, at_batch
from trainpace.workload.specs import build_task
from trainpace.workload.task import WholeStep
from trainpace.workload.trace import trace, trace_task
from trainpace.workload.user_task import Parts, _whole_step_task

WIDTH = 8


def products(workload, phase, batch=1, form="fp32"):
    table = workload.forms[form].operators
    rows = np.array(
        [p == phase and k == "gemm" for p, k in zip(table.phase, table.kind, strict=True)]
    )
    return float((at_batch(table.flops, batch) * table.count)[rows].sum())


def task(step, model, optimizer, data=None):
    data = TensorDataset(torch.randn(16, WIDTH)) if data is None else data
    return _whole_step_task(
        "step", Parts(model=model, optimizer=optimizer, step=step, dataset=data), "mine.py:step"
    )


def one_update(model, optimizer, backward_passes=1):
    def step(batch):
        (x,) = batch
        optimizer.zero_grad()
        for _ in range(backward_passes):
            model(x).sum().backward()
        optimizer.step()

    return step


def linear():
    return nn.Linear(WIDTH, WIDTH, bias=False)


ONE_PRODUCT = 2 * WIDTH * WIDTH


@pytest.mark.parametrize("passes", [1, 3])
def test_every_backward_pass_of_custom_step_is_counted(passes):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = trace_task(task(one_update(model, optimizer, passes), model, optimizer))
    assert products(workload, "forward") == passes * ONE_PRODUCT
    assert (
        products(workload, "backward") == passes * ONE_PRODUCT
    )  # Gradient of the weight; the input needs none.
    assert workload.whole_step


def test_custom_step_trace_matches_equivalent_task():
    """The same training as parts and as one step has the same FLOPs and the same peak memory."""
    from trainpace.workload.task import Task, forward, loss_by

    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    parts = Task(
        "parts",
        model,
        forward,
        loss_by(nn.functional.mse_loss),
        lambda n: data[:n],
        optimizer,
        "a vector",
        dataset=data,
    )
    whole, plain = trace_task(task(step, model, optimizer, data)), trace_task(parts)
    for phase in ("forward", "backward"):
        assert products(whole, phase, 7) == products(plain, phase, 7) > 0
    kept, usual = whole.forms["fp32"].memory, plain.forms["fp32"].memory
    assert (kept.parameter_bytes, kept.optimizer_bytes) == (
        usual.parameter_bytes,
        usual.optimizer_bytes,
    )
    at_1000 = [max(m.peaks @ np.array([1.0, 1.0, 1000.0])) for m in (kept, usual)]
    assert at_1000[0] == pytest.approx(at_1000[1], rel=0.01)


def test_optimizer_calls_form_their_own_phase():
    models = [linear(), linear()]
    optimizers = [torch.optim.Adam(m.parameters()) for m in models]

    def step(batch):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch[0]).sum().backward()
            optimizer.step()

    form = (workload := trace_task(task(step, models, optimizers))).forms["fp32"]
    numbers = 2 * WIDTH * WIDTH
    assert form.memory.optimizer_bytes == 8 * numbers
    assert form.memory.parameter_bytes == 4 * numbers
    assert form.operators.phase.count("optimizer") >= 1
    assert {
        k
        for k, p in zip(form.operators.kind, form.operators.phase, strict=True)
        if p == "optimizer"
    } <= {"optimizer", "view"}
    # The gradients of both models persist between steps, and no optimizer state counts as an activation.
    gradients = form.memory.peaks[:, 0].max()
    assert gradients == 4 * numbers
    assert (form.memory.peaks[:, 1] < 8 * WIDTH * WIDTH).all()
    assert workload.optimizer == "adam"


def test_frozen_teacher_has_no_backward():
    student, teacher = linear(), nn.Linear(WIDTH, 5 * WIDTH, bias=False).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(batch):
        (x,) = batch
        loss = student(x).sum() * teacher(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    workload = trace_task(task(step, {"student": student, "teacher": teacher}, optimizer))
    assert products(workload, "forward") == 6 * ONE_PRODUCT
    assert products(workload, "backward") == ONE_PRODUCT
    assert (workload.parameters, workload.trainable_parameters) == (6 * WIDTH**2, WIDTH**2)


def test_tracing_custom_step_does_not_change_user_models():
    model = nn.Sequential(nn.GRU(WIDTH, WIDTH, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(batch):
        optimizer.zero_grad()
        model(batch[0][:, None])[0].sum().backward()
        optimizer.step()

    made = task(step, model, optimizer)
    trace_task(made, ("fp32", "amp", "half"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    step((torch.randn(2, WIDTH),))  # and it still trains
    assert not torch.equal(before["0.weight_ih_l0"], model.state_dict()["0.weight_ih_l0"])


def test_device_transfers_in_custom_step_are_ignored():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constant = torch.ones(WIDTH)

    def step(batch):
        x = batch[0].to("cuda", non_blocking=True).cpu().to(torch.float32)
        noise = torch.randn(len(x), WIDTH, device="cpu")
        optimizer.zero_grad()
        (model(x + noise) * constant).sum().backward()
        optimizer.step()

    assert products(trace_task(task(step, model, optimizer)), "forward") == ONE_PRODUCT


def test_custom_step_applies_half_precision_and_autocast():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = trace_task(
        task(one_update(model, optimizer), model, optimizer), ("fp32", "amp", "half")
    )
    for form, is_half in (("fp32", False), ("amp", True), ("half", True)):
        table = workload.forms[form].operators
        assert {bool(h) for h, k in zip(table.half, table.kind, strict=True) if k == "gemm"} == {
            is_half
        }
    assert workload.forms["half"].memory.parameter_bytes == 2 * WIDTH**2


@pytest.mark.parametrize(("form", "said"), [("fp32", True), ("amp", False)])
def test_autocast_inside_custom_step_gives_a_note(form, said):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = one_update(model, optimizer)

    def step(batch):
        with torch.autocast("cpu", torch.bfloat16):
            plain(batch)

    notes = trace_task(task(step, model, optimizer), (form,)).notes
    assert any("torch.autocast" in note for note in notes) == said
    assert trace_task(task(plain, model, optimizer), (form,)).notes == ()


def refused(step, model, optimizer, match, error=TrainpaceError):
    with pytest.raises(error, match=match) as caught:
        trace_task(task(step, model, optimizer))
    assert "\n" not in str(caught.value)


def test_custom_step_rejects_models_that_are_not_named():
    model, other = linear(), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(
        one_update(nn.Sequential(model, other), optimizer), model, optimizer, "weights of a model"
    )


def test_value_dependent_custom_step_is_rejected_with_advice():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch[0]).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    refused(step, model, optimizer, r"values.*measure", UserCodeError)


class Stop(Exception):
    pass


@pytest.mark.parametrize("fails_by", [Stop("no such label"), None])
def test_an_error_while_the_graph_is_alive_is_reported_and_weights_are_restored(fails_by):
    model = linear()
    weights = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch[0]).square().sum()
        if fails_by is not None:
            raise fails_by
        if loss > 1:
            loss = 2 * loss
        loss.backward()
        optimizer.step()

    said = "raised Stop at test_whole_step.py line .*: no such label" if fails_by else "values"
    refused(step, model, optimizer, said, UserCodeError)
    assert torch.equal(model.weight, weights)


def test_a_step_that_keeps_the_graph_of_an_unused_loss_is_refused_with_the_remedy():
    model = nn.Sequential(linear(), linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []

    def step(batch):
        kept.append(model(batch[0]).square().sum())
        one_update(model, optimizer)(batch)

    refused(step, model, optimizer, r"loss\.detach\(\)")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm]
)
def test_a_step_of_modules_with_normalized_weights_is_traced(norm):
    model = nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), norm(nn.Linear(WIDTH, WIDTH)))
    x = torch.randn(4, WIDTH)
    model.eval()
    with torch.no_grad():
        before = model(x)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = task(one_update(model, optimizer), model, optimizer)
    workload = trace_task(made, ("fp32", "amp"))
    for form in workload.forms:
        assert products(workload, "forward", form=form) >= 2 * ONE_PRODUCT
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), before)


def test_custom_step_without_optimizer_call_is_rejected():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(
        lambda batch: model(batch[0]).sum().backward(), model, optimizer, "never calls an optimizer"
    )


@pytest.mark.parametrize(
    "variant", [Variant("adamw"), Variant(mode="inference"), Variant(mode="forward_backward")]
)
def test_custom_step_rejects_other_optimizer_or_mode(variant):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainpaceError, match="a step of its own"):
        trace_task(task(one_update(model, optimizer), model, optimizer), variant=variant)


def test_custom_step_has_no_separate_loss():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = task(one_update(model, optimizer), model, optimizer)
    assert isinstance(made.step, WholeStep)
    with pytest.raises(TrainpaceError, match="as a whole"):
        made.loss(model, made.make_batch(1))


EXAMPLE = "examples/tasks/several_models.py"


def test_gan_example_has_flops_of_both_updates():
    workload = trace(f"{EXAMPLE}:gan")
    generator, discriminator = 2 * (16 * 64 + 64 * 32), 2 * (32 * 64 + 64)
    assert products(workload, "forward") == generator + 3 * discriminator
    weights_alone = 2 * (32 * 64 + 2 * 64)  # The first layer's input needs no gradient.
    through_it = 2 * discriminator + 2 * (16 * 64 + 2 * 64 * 32)
    assert products(workload, "backward") == 2 * weights_alone + through_it


def test_distillation_and_preference_examples_have_expected_flops():
    distilled = trace(f"{EXAMPLE}:distillation")
    student, teacher = 2 * (32 * 64 + 64 * 10), 2 * (32 * 256 + 256 * 256 + 256 * 10)
    assert products(distilled, "forward") == student + teacher
    assert products(distilled, "backward") == 2 * (32 * 64 + 2 * 64 * 10)
    task = build_task(f"{EXAMPLE}:preference")
    assert sum(p.numel() for p in task.model.parameters()) == sum(
        p.numel() for m in task.model.values() for p in m.parameters()
    )
    preferred = trace(f"{EXAMPLE}:preference")
    assert 0 < preferred.trainable_parameters < 0.4 * preferred.parameters
