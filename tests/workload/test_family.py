"""One trace for any sequence length: what lies between traced lengths is what a trace there would have found, to the last bit."""

import json

import numpy as np
import pytest

from trainpace.core import records
from trainpace.core.errors import TrainpaceError
from trainpace.workload import PLAIN, Variant, Workload, load_workload, load_workloads, workloads
from trainpace.workload.recording import BATCHES, Family, Recording, cover, points_of
from trainpace.workload.trace import record, trace

SMALL = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 3000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 3000,
        "n_positions": 4096,
    },
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 160,
        "vocab_size": 3000,
        "max_position_embeddings": 4096,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": 4,
        "num_decoder_layers": 4,
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "d_ff": 160,
        "vocab_size": 3000,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    "mamba2": {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 16,
        "expand": 2,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 128,
        "vocab_size": 100,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "vocab_size": 3000,
        "max_position_embeddings": 4096,
        "sliding_window": None,
    },
}
LENGTHS = (96, 128, 160, 256, 320, 512, 1024)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(workloads.CACHE_FOLDER, str(tmp_path / "traces"))


def configuration(folder, name, **changes):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(SMALL[name] | changes))
    return f"transformers:{path}"


def made(length, keys):
    """A traced step of two operators, one of which sees `keys`."""
    numbers = np.zeros((2, 19, 2))
    numbers[:, :5, 1] = [
        [length * keys * 16.0, length, keys, length, keys],
        [length, length * 2, length * 2, 0, 0],
    ]
    alive = np.array([[0.0, 64.0, 4.0 * length], [128.0, 64.0, 4.0 * keys]])
    recording = Recording(
        kind=("elementwise", "elementwise"),
        function=("add", "mul"),
        phase=("forward", "backward"),
        module=("a", "b"),
        half=np.array([False, False]),
        launches=np.array([1, 1]),
        inside=np.array([False, False]),
        role=(),
        numbers=numbers,
        order=np.arange(2),
        alive=alive,
        states=(1.0, 2.0, 0.0, 0.0),
    )
    workload = Workload(
        model="made",
        parameters=1,
        trainable_parameters=1,
        optimizer="sgd",
        sample=f"{length} tokens",
        sequence_length=length,
        traced_batches=BATCHES,
        sample_bytes=8.0 * length,
        forms={"fp32": recording.form()},
    )
    return workload, {"fp32": recording}


def as_text(some):
    return {length: records.to_json(workload) for length, workload in some.items()}


def covered(spec, forms, variant=PLAIN):
    return cover(
        LENGTHS, lambda length: record(spec, forms, variant._replace(sequence_length=length))
    )


@pytest.mark.parametrize(
    ("name", "forms", "variant"),
    [
        ("llama", ("half",), Variant()),
        pytest.param("llama", ("fp32", "amp"), Variant(checkpointing=True), marks=pytest.mark.slow),
        pytest.param("gpt2", ("amp", "half"), Variant(), marks=pytest.mark.slow),
        pytest.param("gpt2", ("fp32",), Variant(legacy=True), marks=pytest.mark.slow),
        pytest.param(
            "bert", ("amp", "fp32"), Variant(mode="forward_backward"), marks=pytest.mark.slow
        ),
        pytest.param("t5", ("fp32", "half"), Variant(), marks=pytest.mark.slow),
    ],
)
def test_a_length_between_traced_ones_is_what_a_trace_of_it_would_be_to_the_last_bit(
    tmp_path, name, forms, variant
):
    spec = configuration(tmp_path, name)
    answer = covered(spec, forms, variant)
    never = [length for length in LENGTHS if length not in points_of(LENGTHS)]
    assert [w.sequence_length for w in answer.traced] == list(points_of(LENGTHS))
    assert len(never) == 3
    (family,) = answer.families
    for length in (never[1], 96 + 32 * 7):
        expected = records.to_json(trace(spec, forms, variant._replace(sequence_length=length)))
        assert records.to_json(family.at(length)) == expected
    again = records.from_json(records.to_json(family), Family)
    assert records.to_json(again.at(128)) == records.to_json(family.at(128))


@pytest.mark.slow
def test_rows_divided_among_experts_are_no_whole_numbers_and_agree_to_twelve_digits(tmp_path):
    spec = configuration(tmp_path, "mixtral")
    (family,) = covered(spec, ("half",)).families
    found, expected = (
        family.at(352).forms["half"].operators,
        trace(spec, ("half",), Variant(sequence_length=352)),
    )
    expected = expected.forms["half"].operators
    assert (found.kind, found.function, found.count.tolist()) == (
        expected.kind,
        expected.function,
        expected.count.tolist(),
    )
    assert found.dims == pytest.approx(expected.dims, rel=1e-12)


@pytest.mark.slow
def test_mamba_2_between_its_chunks_is_traced(tmp_path):
    spec = configuration(tmp_path, "mamba2")
    answer = cover(
        (256, 384, 416, 512, 640),
        lambda length: record(spec, ("fp32",), PLAIN._replace(sequence_length=length)),
    )
    assert [w.sequence_length for w in answer.traced] == [256, 384, 416, 512, 640]
    (family,) = answer.families  # of the multiples of a chunk, which are quadratic among themselves
    assert (family.holds(512), family.holds(416)) == (True, False)


def test_a_window_between_two_lengths_parts_them():
    """Up to length 256 an operator is linear, above it constant: no polynomial holds on both sides."""
    traced = []

    def traced_at(length):
        traced.append(length)
        return made(length, min(length, 256))

    lengths = tuple(range(32, 1025, 32))
    answer = cover(lengths, traced_at)
    expected = {length: made(length, min(length, 256))[0] for length in lengths}
    assert as_text({length: answer.at(length) for length in lengths}) == as_text(expected)
    assert len(answer.families) > 1
    assert len(traced) < len(lengths)


def test_a_family_speaks_for_no_length_nearer_to_the_traced_ones_than_these_are_to_each_other():
    """A model that fills its sequences up to chunks of 256 tokens is quadratic on multiples of 256, and another between."""

    def filled_up(length):
        return made(length, -(-length // 256) * 256)

    lengths = (512, 1024, 1056, 1536, 1568, 2048)
    answer = cover(lengths, filled_up)
    assert as_text({n: answer.at(n) for n in lengths}) == as_text(
        {n: filled_up(n)[0] for n in lengths}
    )
    (family,) = cover((512, 1024, 1536, 2048), filled_up).families
    assert [n for n in range(512, 2049) if family.holds(n)] == [512, 1024, 1536, 2048]
    everywhere = tuple(range(32, 2049, 32))
    answer = cover(everywhere, filled_up)
    assert as_text({n: answer.at(n) for n in everywhere}) == as_text(
        {n: filled_up(n)[0] for n in everywhere}
    )


def test_lengths_of_other_rests_are_traced_apart():
    answer = cover((100, 132, 164, 196, 228, 1000), lambda length: made(length, length))
    assert [w.sequence_length for w in answer.traced] == [100, 132, 196, 228, 1000]
    assert as_text({0: answer.at(164)}) == as_text({0: made(164, 164)[0]})
    assert not answer.families[0].holds(165)
    assert not answer.families[0].holds(260)


def test_several_lengths_are_traced_by_one_process_and_kept_for_any_between(tmp_path, monkeypatch):
    started = []
    isolated = workloads.run_isolated
    monkeypatch.setattr(
        workloads, "run_isolated", lambda *a: started.append(a[1]["lengths"]) or isolated(*a)
    )
    spec = configuration(tmp_path, "gpt2", n_layer=1)
    found = load_workloads(spec, ("fp32",), Variant(), (64, 96, 128, 160, 256))
    assert started == [[64, 96, 128, 160, 256]]
    assert [found[length].sequence_length for length in found] == [64, 96, 128, 160, 256]
    monkeypatch.setattr(workloads, "started_isolated", None)  # nothing is traced from here on
    assert load_workload(spec, ("fp32",), Variant(sequence_length=192)).sample == "192 tokens"
    assert load_workloads(spec, ("fp32",), Variant(), (64, 224))[224].sequence_length == 224


def test_a_model_with_a_length_of_its_own_has_no_others(tmp_path):
    with pytest.raises(TrainpaceError, match="sequence length"):
        load_workloads(f"{tmp_path}/train.py:task", ("fp32",), Variant(), (64, 96))
