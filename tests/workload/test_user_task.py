"""Valid return values of a task function, how samples become batches, and the errors for invalid ones."""

import json

import pytest
import torch

from trainpace.core.errors import OutOfMemory, TrainpaceError
from trainpace.core.records import to_json
from trainpace.workload import Variant, load_workload, workloads
from trainpace.workload.specs import build_task
from trainpace.workload.trace import trace
from trainpace.workload.user_task import as_with_a_gpu

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class OwnLoss(nn.Module):
    def __init__(self, form="dict"):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 2), form
    def forward(self, x, labels):
        out = self.layer(x)
        loss = nn.functional.cross_entropy(out, labels)
        return {"dict": {"loss": loss, "logits": out}, "tuple": (out, loss), "alone": loss, "none": {"logits": out}}[self.form]

def adam(model):
    return torch.optim.Adam(model.parameters())

DICTS = [{"x": torch.randn(4), "labels": torch.tensor(1)} for _ in range(8)]
PAIRS = [(torch.randn(4), torch.tensor(1)) for _ in range(8)]
model = nn.Linear(4, 2)
class Named(nn.Linear):
    def forward(self, x):
        return super().forward(x)
named = Named(4, 2)

def task():
"""


def file(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + "    " + body.replace("\n", "\n    ") + "\n")
    return f"{path}:task"


@pytest.mark.parametrize("form", ["dict", "tuple", "alone"])
def test_model_can_return_its_own_loss(tmp_path, form):
    workload = trace(
        file(
            tmp_path,
            f"m = OwnLoss({form!r})\nreturn m, None, adam(m), {'PAIRS' if form == 'tuple' else 'DICTS'}",
        )
    )
    assert (workload.parameters, workload.optimizer) == (10, "adam")


def test_dict_samples_pass_labels_to_loss(tmp_path):
    workload = trace(file(tmp_path, "return named, nn.CrossEntropyLoss(), adam(named), DICTS"))
    assert workload.sample == "x 1 x 4"
    assert (
        build_task(
            file(tmp_path, "return named, nn.CrossEntropyLoss(), adam(named), DICTS")
        ).loss_name
        == "CrossEntropyLoss"
    )


def test_task_can_return_dict_without_optimizer(tmp_path):
    workload = trace(
        file(tmp_path, 'return {"model": model, "loss": nn.CrossEntropyLoss(), "dataset": PAIRS}')
    )
    assert workload.optimizer == "sgd_momentum"


def test_dataloader_sets_batch_size_and_collate(tmp_path):
    body = """
def joined(samples):
    return torch.stack([x for x, _ in samples]) * 2, torch.stack([y for _, y in samples])
return model, nn.CrossEntropyLoss(), adam(model), DataLoader(PAIRS, batch_size=6, collate_fn=joined)"""
    task = build_task(file(tmp_path, body))
    assert task.settings == {"micro_batch": 6}
    assert torch.equal(task.make_batch(1)[0][0], 2 * task.dataset[0][0])
    assert trace(file(tmp_path, body)).settings == {"micro_batch": 6}


def test_iterable_dataset_uses_first_256_samples(tmp_path):
    body = """
class Stream(IterableDataset):
    def __iter__(self):
        while True:
            yield PAIRS[0]
return model, nn.CrossEntropyLoss(), adam(model), Stream()"""
    task = build_task(file(tmp_path, body))
    assert len(task.dataset) == 256
    assert "first 256" in task.notes[0]


PADDED = """
lengths = [3, 5, 9, 20]
data = [{"input_ids": torch.ones(lengths[i % 4], dtype=torch.long)} for i in range(64)]
def padded(samples):
    ids = nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
    return {"input_ids": ids, "labels": ids, "attention_mask": (ids > 0).long()}
class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 4)
    def forward(self, input_ids, labels, attention_mask):
        return {"loss": self.table(input_ids).mean()}
m = Tokens()
return m, None, adam(m), DataLoader(data, batch_size=SIZE, collate_fn=padded)"""


@pytest.mark.parametrize(("size", "length"), [(16, 20), (1, 9)])
def test_varying_lengths_are_traced_at_padded_batch_length(tmp_path, size, length):
    """A batch of 16 almost always has one sample of maximum length; the mean length is 9.25."""
    spec = file(tmp_path, PADDED.replace("SIZE", str(size)))
    workload = trace(spec)
    assert workload.sequence_length == length
    assert f"in batches of {size}" in workload.notes[0]
    assert build_task(spec).pads
    assert build_task(spec).make_batch(3)["input_ids"].shape == (
        3,
        9,
    )  # The measured batch is a real one.


def test_sequence_length_must_match_samples(tmp_path):
    spec = file(tmp_path, PADDED.replace("SIZE", "1"))
    assert trace(spec, variant=Variant(sequence_length=9)).sequence_length == 9
    with pytest.raises(TrainpaceError, match=r"9 tokens.*99 tokens"):
        trace(spec, variant=Variant(sequence_length=99))


def test_equal_sized_samples_are_not_padded(tmp_path):
    task = build_task(file(tmp_path, "return model, nn.CrossEntropyLoss(), adam(model), PAIRS"))
    assert task.notes == ()
    assert not task.pads


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "return model, nn.CrossEntropyLoss(), adam(model)",
            "returned 3 things. FILE.py:FUNCTION must return",
        ),
        ("return {'modle': model}", "unknown part of the task"),
        ("return model, 3, adam(model), PAIRS", "a int as loss"),
        ("return model, None, 3, PAIRS", "a int as optimizer"),
        (
            "return [model, model], nn.CrossEntropyLoss(), adam(model), PAIRS",
            "Several models need `step`",
        ),
        (
            "return model, nn.CrossEntropyLoss(), [adam(model)], PAIRS",
            "Several optimizers need `step`",
        ),
        ("m = OwnLoss('none')\nreturn m, None, adam(m), DICTS", "a dict of logits"),
        (
            "return named, nn.CrossEntropyLoss(), adam(named), [{'x': torch.randn(4)}]",
            "a dict of x",
        ),
        ("return model, nn.CrossEntropyLoss(), adam(model), {}", "__len__ above 0"),
        (
            "return {'model': model, 'optimizer': adam(model), 'step': 3, 'dataset': PAIRS}",
            "a int as step",
        ),
        (
            "return {'model': model, 'loss': print, 'optimizer': adam(model), 'step': print, 'dataset': PAIRS}",
            "both a loss and a step",
        ),
        ("return {'model': model, 'step': print, 'dataset': PAIRS}", "a NoneType as optimizer"),
        (
            "return {'model': [model, 3], 'optimizer': adam(model), 'step': print, 'dataset': PAIRS}",
            "a int as model",
        ),
    ],
)
def test_invalid_task_return_value_names_valid_ones(tmp_path, body, words):
    with pytest.raises(TrainpaceError) as caught:
        trace(file(tmp_path, body))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_function_may_move_a_model_of_the_meta_device():
    with torch.device("meta"):
        model = torch.nn.Linear(4, 2)
    as_with_a_gpu(lambda: model.to("cuda", torch.bfloat16))
    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    other = torch.nn.Linear(4, 2)
    as_with_a_gpu(lambda: other.to(torch.float64))
    assert other.weight.dtype == torch.float64


HUGE = "m = nn.Sequential(nn.Linear(4, 2**21), nn.Linear(2**21, 2**21))\nreturn m, nn.MSELoss(), adam(m), {}"


def test_weights_beyond_the_memory_are_traced_on_meta(tmp_path, monkeypatch):
    spec = file(tmp_path, HUGE.format("[(torch.randn(4), torch.randn(2**21))] * 8"))

    def traced(_, asked, *__):
        (request,) = asked["requests"]
        if "on_meta" not in request:
            raise OutOfMemory("out of memory.", "Try a smaller batch.")
        return json.dumps([to_json(trace(request["spec"], request["forms"], on_meta=True))])

    monkeypatch.setattr(workloads, "run_isolated", traced)
    workload = load_workload(spec, ["fp32"])
    assert workload.parameters > 4e12
    assert any("meta device" in note for note in workload.notes)


def test_out_of_memory_stays_the_error_if_meta_fails(tmp_path, monkeypatch):
    def failed(_, asked, *__):
        if "on_meta" in asked["requests"][0]:
            raise TrainpaceError("from_pretrained rejects the meta device.")
        raise OutOfMemory("out of memory.", "Try a smaller batch.")

    monkeypatch.setattr(workloads, "run_isolated", failed)
    with pytest.raises(OutOfMemory) as caught:
        load_workload(file(tmp_path, "return None"), ["fp32"])
    assert caught.value.hint == workloads.WEIGHTLESS
