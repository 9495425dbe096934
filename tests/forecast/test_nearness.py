"""The nearest packaged runs: invariants of the distance, and ten typical questions."""

import json
import re
from functools import cache

import pytest
from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import find_device
from trainpace.forecast import PublicJournal, nearest, packaged_traces, public_journal, signature_of
from trainpace.forecast.published import MOST, NEAR
from trainpace.workload import Variant, form_of, load_workload


@cache
def workload_of(spec, form, length=None, mode="train"):
    return load_workload(spec, (form,), Variant(sequence_length=length, mode=mode), 120)


def asked(spec, gpu, precision, batch, gpus=1, length=None, mode="train", **execution):
    workload = workload_of(spec, form_of(precision), length, mode)
    e = Execution(micro_batch=batch, precision=precision, nproc_per_node=gpus, **execution)
    return nearest(workload, e, find_device(gpu))


def packaged(place):
    """Return (run, workload, conditions) of a packaged run."""
    journal, traces = public_journal(), packaged_traces()
    run = journal.runs[place]
    stated = traces.conditions[run.id]
    return run, traces.workloads[stated.trace], stated


def able(every):
    journal, traces = public_journal(), packaged_traces()
    return [i for i, run in enumerate(journal.runs) if run.id in traces.conditions][::every]


@pytest.mark.slow
def test_every_run_is_nearest_to_itself():
    for place in able(97):
        run, workload, stated = packaged(place)
        found = nearest(workload, stated.execution, find_device(stated.device))
        # the nearest run may be another one with the same conditions; Keras and untrusted runs add some distance
        first = found.runs[0]
        assert (first.run.device, first.run.gpus) == (run.device, run.gpus), run.id
        assert first.run.micro_batch == run.micro_batch
        assert first.run.precision == run.precision
        assert first.run.mode == run.mode
        assert first.distance <= 0.5


def one_run_at(batches, card="T4"):
    """Return a workload and a journal with the same run at several batch sizes."""
    workload = workload_of("resnet18", "fp32")
    made = replace(
        next(
            run for run in public_journal().runs if run.device == card and run.precision == "fp32"
        ),
        compile="eager",
        memory_format="nchw",
        collection="made",
        gpus=1,
        nodes=1,
        mode="train",
        parallelism=None,
        trust="A",
    )
    runs = tuple(replace(made, id=f"{batch:010x}", micro_batch=batch) for batch in batches)
    return workload, PublicJournal(
        fingerprint="",
        runs=runs,
        signatures=(signature_of(workload, "fp32"),),
        signature_of_run=(0,) * len(runs),
        cards={card: public_journal().cards[card]},
    )


def test_distance_grows_with_batch_difference():
    workload, journal = one_run_at([1, 2, 4, 8, 16, 32, 64, 128, 256])
    for batch in (1, 7, 32, 200, 1000):
        found = nearest(
            workload, Execution(micro_batch=batch), find_device("T4"), most=9, journal=journal
        )
        distances = {abs(near.run.micro_batch - batch): near.distance for near in found.runs}
        ratios = sorted(
            (max(n.run.micro_batch / batch, batch / n.run.micro_batch), n.distance)
            for n in found.runs
        )
        assert [d for _, d in ratios] == sorted(d for _, d in ratios)
        if 0 in distances:
            assert distances[0] == 0


def test_identical_run_has_zero_distance():
    workload, journal = one_run_at([32])
    [near] = nearest(workload, Execution(micro_batch=32), find_device("T4"), journal=journal).runs
    assert near.distance == 0
    assert near.unlike == ()
    assert near.alike == ("the same operators", "the same card")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"micro_batch": 64}, "batch 32 instead of 64"),
        ({"precision": "torch_fp32"}, "fp32 instead of torch_fp32"),
        ({"nproc_per_node": 4}, "1 GPU instead of 4"),
        ({"compile": True}, "not compiled"),
        ({"channels_last": True}, "NCHW"),
        ({"activation_checkpointing": "full"}, "no activations recomputed"),
    ],
)
def test_each_difference_adds_distance_and_description(changes, words):
    workload, journal = one_run_at([32])
    execution = Execution(**{"micro_batch": 32, **changes})
    near = nearest(workload, execution, find_device("T4"), journal=journal).closest
    assert near.distance > 0
    assert words in near.unlike


def test_distance_grows_with_card_difference():
    workload, journal = one_run_at([32])
    at = [
        nearest(workload, Execution(micro_batch=32), find_device(gpu), journal=journal).closest
        for gpu in ("T4", "RTX 2080 Ti", "A100", "H100")
    ]
    distances = [near.distance for near in at]
    assert distances == sorted(distances)
    assert "the same card" in at[0].alike
    assert at[1].unlike[0].startswith("another Turing card")


def test_model_names_do_not_affect_distance():
    workload, journal = one_run_at([32])
    renamed = replace(journal, runs=tuple(replace(run, model="zzz") for run in journal.runs))
    e = Execution(micro_batch=32)
    assert (
        nearest(
            replace(workload, model="aaa"), e, find_device("T4"), journal=renamed
        ).closest.distance
        == 0
    )


def test_untraced_precision_has_no_near_runs():
    workload, _ = one_run_at([32])
    found = nearest(workload, Execution(micro_batch=32, precision="bf16"), find_device("T4"))
    assert found.runs == ()
    assert found.closest is None
    with pytest.raises(TrainpaceError):
        signature_of(workload, "bf16")


def test_empty_journal_has_no_near_runs():
    workload, journal = one_run_at([32])
    empty = replace(journal, runs=(), signature_of_run=())
    assert (
        nearest(workload, Execution(micro_batch=32), find_device("T4"), journal=empty).closest
        is None
    )


def test_nearest_returns_at_most_three_sorted_runs():
    found = asked("resnet50", "RTX 3090", "amp_fp16", 64)
    assert 0 < len(found.runs) <= MOST
    assert [near.distance for near in found.runs] == sorted(near.distance for near in found.runs)
    assert all(near.distance < NEAR for near in found.runs)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
CONFIGURATIONS = {
    "bert-large": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "llama-8b": LLAMA
    | {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    "llama-2-7b": LLAMA | {"vocab_size": 32000, "intermediate_size": 11008},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "mixtral": LLAMA
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "vit-base": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
    },
}
QUESTIONS = [
    # model, card, precision, batch, other arguments; expected card, expected model pattern, kind of model, is it near?
    ("resnet50", "A100", "amp_fp16", 256, {}, r"A100|RTX 3090", r"res", "convolutions", True),
    ("resnet50", "T4", "fp32", 32, {}, r"T4", r"ResNet50", "convolutions", True),
    ("bert-large", "V100", "fp32", 8, {"length": 512}, r"V100", r"BERT", "transformers", True),
    (
        "llama-8b",
        "H100",
        "bf16",
        1,
        {"length": 8192, "gpus": 8, "zero_stage": 3},
        r"H100",
        r"Llama 3.1 8B",
        "transformers",
        True,
    ),
    (
        "vit-base",
        "RTX 4090",
        "amp_fp16",
        256,
        {"mode": "inference"},
        r"RTX 4090",
        r"(be|v|de)it",
        "transformers",
        True,
    ),
    (
        "vit-base",
        "RTX 4090",
        "amp_fp16",
        64,
        {},
        r"RTX [34]090",
        r"(be|v|de)it",
        "transformers",
        False,
    ),
    ("gpt2", "A100", "amp_bf16", 12, {"length": 1024}, r"A100", r"gpt", "transformers", True),
    (
        "llama-2-7b",
        "H100",
        "bf16",
        1,
        {"length": 4096, "gpus": 8, "zero_stage": 3},
        r"H100",
        r"(?i)llama|mpt",
        "transformers",
        True,
    ),
    ("mobilenet_v2", "K80", "fp32", 32, {}, r"K80", r"MobileNetV2", "convolutions", True),
    ("mobilenet_v2", "T4", "fp32", 32, {}, r"T4", r"MobileNetV2", "convolutions", True),
    (
        "mixtral",
        "H100",
        "bf16",
        1,
        {"length": 4096, "gpus": 8, "ep": 8},
        r"H100|B200|GB200",
        r"MoE|DeepSeek|GPT OSS|A3B",
        "experts",
        False,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: f"{q[0]} on {q[1]}, {q[2]}, {q[3]}")
def test_typical_questions_have_sensible_nearest_run(tmp_path, question):
    model, gpu, precision, batch, more, card, kin, kind, is_near = question
    if model in CONFIGURATIONS:
        file = tmp_path / f"{model}.json"
        file.write_text(json.dumps(CONFIGURATIONS[model]))
        model = f"transformers:{file}"
    found = asked(model, gpu, precision, batch, **more)
    assert bool(found.runs) == is_near
    first = found.closest.run
    assert re.search(card, first.device), first
    assert re.search(kin, first.model), first
    assert first.model_kind == kind


def test_vgg_is_nearest_to_vgg_on_same_card_at_every_batch():
    for batch in range(1, 71):
        near = asked("vgg16", "T4", "fp32", batch).closest
        assert near.run.model.startswith("VGG")
        assert near.run.device == "T4"
        assert near.is_near == (near.distance < NEAR)
    assert asked("vgg16", "T4", "fp32", 64).closest.run.micro_batch == 64
    assert asked("vgg16", "T4", "fp32", 32).closest.run.micro_batch == 32
