"""Round trips of each format, and 500 damaged files that must not raise unexpected errors."""

import json
import random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.test_readers import EXAMPLES
from trainpace.configs import combine, parse_command, parse_config
from trainpace.core.errors import TrainpaceError

counts = st.integers(1, 4096)
common = {"micro_batch": counts, "accumulation": counts}


def found(config):
    return {s.name: s.value for s in config.settings}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **common,
            "max_steps": counts,
            "learning_rate": st.floats(1e-8, 10),
            "compile": st.booleans(),
        },
    ),
    st.booleans(),
)
def test_hugging_face_round_trip(settings, as_yaml):
    keys = {
        "micro_batch": "per_device_train_batch_size",
        "accumulation": "gradient_accumulation_steps",
        "compile": "torch_compile",
    }
    data = {
        "output_dir": "out",
        "logging_steps": 10,
        **{keys.get(k, k): v for k, v in settings.items()},
    }
    text = yaml.safe_dump(data) if as_yaml else json.dumps(data)
    assert found(parse_config(text, "a.yaml" if as_yaml else "a.json")) == settings


@given(
    st.fixed_dictionaries(
        {"global_batch": counts}, optional={**common, "zero_stage": st.integers(0, 3)}
    )
)
def test_deepspeed_round_trip(settings):
    keys = {
        "global_batch": "train_batch_size",
        "micro_batch": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    data = {keys[k]: v for k, v in settings.items() if k in keys}
    if "zero_stage" in settings:
        data["zero_optimization"] = {"stage": settings["zero_stage"]}
    assert found(parse_config(json.dumps(data), "ds.json")) == settings


@given(
    st.fixed_dictionaries(
        {}, optional={**common, "nnodes": counts, "nproc_per_node": counts, "max_steps": counts}
    )
)
def test_lightning_round_trip(settings):
    keys = {
        "accumulation": "accumulate_grad_batches",
        "nnodes": "num_nodes",
        "nproc_per_node": "devices",
        "max_steps": "max_steps",
    }
    data = {"trainer": {keys[k]: v for k, v in settings.items() if k in keys}}
    if "micro_batch" in settings:
        data["data"] = {"batch_size": settings["micro_batch"]}
    assert found(parse_config(yaml.safe_dump(data), "t.yaml")) == settings


@given(
    st.fixed_dictionaries(
        {"world_size": counts}, optional={"nnodes": counts, "accumulation": counts}
    )
)
def test_accelerate_round_trip(settings):
    keys = {
        "world_size": "num_processes",
        "nnodes": "num_machines",
        "accumulation": "gradient_accumulation_steps",
    }
    data = {"compute_environment": "LOCAL_MACHINE", **{keys[k]: v for k, v in settings.items()}}
    assert found(parse_config(yaml.safe_dump(data), "a.yaml")) == settings


@given(counts, counts, st.sampled_from(["=", " "]), st.sampled_from("-_"))
def test_torchrun_and_sbatch_round_trip(nodes, processes, equals, dash):
    command = (
        f"torchrun --nnodes{equals}{nodes} --nproc{dash}per{dash}node{equals}{processes} train.py"
    )
    assert found(parse_command(command)) == {"nnodes": nodes, "nproc_per_node": processes}
    script = f"#!/bin/bash\n#SBATCH --nodes={nodes}\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node {processes} t.py\n"
    assert {
        s.name: {x.value for x in parse_config(script, "j.sh").settings if x.name == s.name}
        for s in parse_config(script, "j.sh").settings
    } == {"nnodes": {nodes}, "nproc_per_node": {processes}}


def mutate(text, rng):
    """Damage a random byte, line, value or key of a file."""
    kind = rng.randrange(6)
    lines = text.splitlines()
    if kind == 0:
        at = rng.randrange(len(text))
        return text[:at] + chr(rng.randrange(1, 0x250)) + text[at + 1 :]
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at] + text[at + rng.randrange(1, 20) :]
    if kind == 2:
        rng.shuffle(lines)
        return "\n".join(lines)
    if kind == 3:
        return "\n".join([*lines, rng.choice(lines)])
    if kind == 4:
        words = text.split(" ")
        words[rng.randrange(len(words))] = rng.choice(
            ["", "-1", "1e400", "null", "[]", "{}", "auto", "'", "\t", "*", "&a", "!!x y", "0x10"]
        )
        return " ".join(words)
    return text[: rng.randrange(len(text))]


@pytest.mark.parametrize("seed", range(500))
def test_damaged_files_never_raise_unexpected_errors(seed):
    rng = random.Random(seed)
    file, text = rng.choice(sorted(EXAMPLES.items()))
    for _ in range(rng.randrange(1, 4)):
        text = mutate(text, rng) or "x"
    try:
        config = parse_config(text, file)
    except TrainpaceError as error:
        assert file in str(error)
        return
    combine([config])
    for setting in config.settings:  # every value that is read occurs in the file
        if (
            isinstance(setting.value, int)
            and not isinstance(setting.value, bool)
            and setting.name != "nproc_per_node"
        ):
            assert str(setting.value) in text or setting.key.startswith("trainer.strategy")
