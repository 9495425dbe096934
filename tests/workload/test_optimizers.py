"""Optimizers by name: states and update FLOPs compared with the real ones, and the default optimizer."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nouns import stacked
from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import OPTIMIZERS, Execution, find_optimizer, optimizer_called
from trainpace.core.hardware import Cluster, find_device
from trainpace.forecast import Forecaster, Target
from trainpace.workload import Variant
from trainpace.workload.optimizers import make_optimizer, with_optimizer
from trainpace.workload.task import Task
from trainpace.workload.trace import trace, trace_task

REAL = sorted(
    name for name, kind in OPTIMIZERS.items() if kind.library in ("torch", "transformers")
)
WORDS, WIDTH = 300, 96


class Small(nn.Module):
    """A model of an embedding, a hidden matrix of 9,216 values, a bias of 96 and a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        return self.head(self.hidden(self.words(ids)))


def small_task(model=None, **changes):
    def batch(n):
        ids = torch.randint(0, WORDS, (n, 16))
        return ids, ids

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    settings = {"sample": "16 tokens", "sequence_length": 16} | changes
    return Task("small", model or Small(), lambda m, b: m(b[0]), loss, batch, None, **settings)


def traced(name, forms=("fp32",)):
    return trace_task(small_task(), forms, Variant(name))


def update(workload, form="fp32"):
    o = workload.forms[form].operators
    rows = [i for i, phase in enumerate(o.phase) if phase == "optimizer"]
    keys = [
        (o.kind[i], o.function[i], o.flops[i, 0], o.read_bytes[i, 0], int(o.count[i])) for i in rows
    ]
    return sorted(keys)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.filterwarnings("ignore")
def test_traced_state_bytes_match_real_optimizer(name):
    if OPTIMIZERS[name].library == "transformers":
        pytest.importorskip("transformers")
    model, task = Small(), small_task()
    optimizer = make_optimizer(name, model)
    task.loss(model, task.make_batch(2)).backward()
    optimizer.step()
    tensors = [
        t
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    real = sum(t.numel() * t.element_size() for t in tensors)
    assert traced(name).forms["fp32"].memory.optimizer_bytes == pytest.approx(real, abs=64)


def test_8_bit_states_include_scales_and_skip_small_tensors():
    quantised, bias = 2 * WORDS * WIDTH + WIDTH**2, WIDTH
    scales = 4 * (2 * -(-WORDS * WIDTH // 256) + WIDTH**2 // 256)
    memory = traced("adamw_8bit").forms["fp32"].memory
    assert memory.optimizer_bytes == 2 * (quantised + scales + 4 * bias)
    assert traced("lion_8bit").forms["fp32"].memory.optimizer_bytes == quantised + scales + 4 * bias
    half = traced("adamw_32bit", ("half",)).forms["half"].memory
    assert half.optimizer_bytes == 2 * 4 * (quantised + bias), (
        "bitsandbytes' states are in fp32 whatever the weights"
    )


def test_8_bit_state_bytes_match_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = Small()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    sizes = 0
    for i, p in enumerate(model.parameters()):
        optimizer.init_state(optimizer.param_groups[0], p, 0, i)
        state = {
            k: v
            for k, v in optimizer.state[p].items()
            if isinstance(v, torch.Tensor) and not k.startswith("qmap")
        }
        sizes += sum(t.numel() * t.element_size() for t in state.values())
    assert traced("adamw_8bit").forms["fp32"].memory.optimizer_bytes == sizes


def test_paged_states_are_counted_separately():
    large = nn.Sequential(nn.Embedding(WORDS, 512), nn.Linear(512, WORDS))
    plain, paged = (
        trace_task(small_task(large), ("fp32",), Variant(n)).forms["fp32"].memory
        for n in ("adamw_8bit", "paged_adamw_8bit")
    )
    assert paged.paged_bytes == 2 * 2 * WORDS * 512
    assert paged.optimizer_bytes + paged.paged_bytes == plain.optimizer_bytes


def test_muon_update_flops_match_torch():
    model, task = Small(), small_task()
    optimizer = make_optimizer("muon", model)
    task.loss(model, task.make_batch(2)).backward()
    optimizer.step()
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    products = [row for row in update(traced("muon")) if row[0] == "gemm"]
    assert sum(flops * count for _, _, flops, _, count in products) == counted.get_total_flops() > 0


def test_8_bit_update_reads_all_and_writes_all_but_gradient():
    o = traced("adamw_8bit").forms["fp32"].operators
    i = next(
        i for i, name in enumerate(o.function) if name == "blockwise_update_" and o.count[i] == 2
    )  # table and head
    n = WORDS * WIDTH
    states = 2 * (n + 4 * -(-n // 256))
    assert (o.read_bytes[i, 0], o.written_bytes[i, 0]) == (8 * n + states, 4 * n + states)


@pytest.mark.parametrize(
    "name", ["sgd", "nadam", "muon", "adafactor", "adafactor_transformers", "paged_lion_8bit"]
)
@pytest.mark.filterwarnings("ignore")
def test_replacing_optimizer_matches_a_new_trace(name):
    if OPTIMIZERS[name].library == "transformers":
        pytest.importorskip("transformers")
    saved, new = traced("adamw", ("amp", "half")), traced(name, ("amp", "half"))
    changed = with_optimizer(saved, name)
    assert changed.optimizer == new.optimizer == name
    for form in ("amp", "half"):
        assert update(changed, form) == update(new, form)
        ours, theirs = changed.forms[form].memory, new.forms[form].memory
        assert (ours.optimizer_bytes, ours.paged_bytes) == (
            theirs.optimizer_bytes,
            theirs.paged_bytes,
        )
    for batch in (1, 64):
        gib = [forecast(w, micro_batch=batch).memory.allocated_gib for w in (changed, new)]
        # Temporaries of consecutive tensors overlap, and the order of shapes is not stored.
        assert gib[0] == pytest.approx(gib[1], rel=0.15 if "adafactor" in name else 1e-6)


def test_replacing_optimizer_needs_parameter_shapes():
    with pytest.raises(TrainpaceError, match="without the shapes"):
        with_optimizer(stacked(), "adamw_8bit")


def test_unknown_optimizer_error_lists_nearest_and_known():
    with pytest.raises(
        UnknownName, match=r"Nearest: .*adamw_8bit.*Known: sgd, .*muon.*paged_lion_8bit"
    ):
        find_optimizer("adamw_8bits")
    with pytest.raises(UnknownName, match="galore"):
        traced("galore_adamw")


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("adamw_torch", "adamw"),
        ("adamw_torch_fused", "adamw"),
        ("adamw_bnb_8bit", "adamw_8bit"),
        ("AdamW8bit", "adamw_8bit"),
        ("paged_adamw", "paged_adamw_32bit"),
        ("PagedAdamW8bit", "paged_adamw_8bit"),
        ("lion", "lion_32bit"),
        ("Muon", "muon"),
        ("rmsprop_bnb_8bit", "rmsprop_8bit"),
        ("adamw_torch_4bit", "adamw_torch_4bit"),
        ("nobodys", "nobodys"),
    ],
)
def test_optimizer_names_of_other_tools_are_recognized(written, known):
    assert optimizer_called(written) == known


def test_language_models_assume_adamw(tmp_path):
    pytest.importorskip("transformers")
    sizes = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 100,
        "n_positions": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    language = trace(f"transformers:{tmp_path / 'config.json'}")
    assert (language.optimizer, language.optimizer_in_words) == ("adamw", "adamw (assumed)")
    assert language.forms["fp32"].memory.optimizer_bytes == pytest.approx(
        2 * 4 * language.parameters, rel=1e-3
    )
    assert trace("resnet18").optimizer_in_words == "sgd_momentum (assumed)"
    assert traced("adamw").optimizer_in_words == "adamw"


H100 = Cluster(device=find_device("H100"), devices_per_node=8)


def forecast(workload, **changes):
    e = Execution(
        **{
            "micro_batch": 1,
            "precision": "bf16",
            "nproc_per_node": 8,
            "optimizer": workload.optimizer,
            **changes,
        }
    )
    return Forecaster(workload, Target(H100)).forecast(e)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("adamw_8bit", {"zero_stage": 1, "offload_optimizer": True}, "update on the host with"),
        ("muon", {"zero_stage": 3}, "whole matrices"),
        ("adafactor", {"zero_stage": 2}, "flat"),
    ],
)
def test_unsupported_optimizer_settings_are_rejected_by_name(name, changes, reason):
    result = forecast(traced(name, ("half",)), **changes)
    assert result.step is None
    assert name in result.reason
    assert reason in result.reason


def test_zero_keeps_8_bit_states_but_widens_16_bit():
    plain, eight = traced("adamw", ("half",)), traced("adamw_8bit", ("half",))
    weights = plain.forms["half"].memory.parameter_bytes / 2**30
    gib = {
        w.optimizer: forecast(w, zero_stage=1).memory.optimizer_states_gib * 8
        for w in (plain, eight)
    }
    assert gib["adamw"] == pytest.approx(
        6 * weights, rel=0.01
    )  # an fp32 copy and two moments: 12 bytes for 2
    assert gib["adamw_8bit"] == pytest.approx(
        2 * weights + eight.forms["half"].memory.optimizer_bytes / 2**30, rel=0.01
    )


def test_offloaded_lion_update_is_faster_than_adamw():
    times = [
        forecast(traced(n, ("half",)), zero_stage=1, offload_optimizer=True).step.optimizer_ms
        for n in ("adamw", "lion")
    ]
    assert times[1] == pytest.approx(times[0] * 22 / 30, rel=0.02)
