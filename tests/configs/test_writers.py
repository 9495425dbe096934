"""Writers put a plan into settings files, leave the rest unchanged, and report settings they cannot write."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from trainpace.configs import (
    Changes,
    combine,
    execution_of,
    new_file,
    parse_config,
    rewrite,
    save_all,
    settings_of,
)
from trainpace.configs.files import BY_HAND, WRITERS, write_changes
from trainpace.core.errors import TrainpaceError, UnreadableInput
from trainpace.core.execution import Execution
from trainpace.core.intake import read_text

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "planted"))
from config_loading import LIBRARIES, differing, loaded, mismatches  # noqa: E402
from config_plans import FILES, execution, rounds  # noqa: E402

NEEDS_ENGINES = pytest.mark.skipif(
    not (ROOT / ".engines").is_dir(), reason="make .engines/installed"
)
START = Execution(micro_batch=4, accumulation=8, nproc_per_node=8)


def changed(text, file, before=START, **fields):
    return write_changes(text, file, Changes(before=before, after=replace(before, **fields)))


def lines(written):
    return [line for line in written.diff.splitlines()[2:] if line[:1] in "+-"]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("seed", [1, 2])
def test_written_files_are_read_back_as_planned(kind, seed):
    for one in rounds(kind, 8, seed):
        assert one.wrong() == {}, one.written.diff
        assert BY_HAND not in one.written.left.values()
        for name in Changes(before=one.before, after=one.wanted).names - {
            "global_batch",
            "world_size",
            "gpus_per_node",
        }:
            assert name in one.written.wrote or one.written.left[name]


@pytest.mark.parametrize("kind", FILES)
def test_example_files_state_the_default_execution(kind):
    for file, text in FILES[kind].items():
        read = parse_config(text, file)
        assert read.format == kind
        values = {s.name: s.value for s in read.settings}
        # the only exception: Lightning's strategy class and FSDP files state the sharding
        assert (
            execution_of({n: v for n, v in values.items() if n != "sharding"}, Execution())
            == Execution()
        )


@pytest.mark.parametrize("kind", FILES)
def test_writing_same_execution_leaves_file_unchanged(kind):
    for one in rounds(kind, 4, seed=3):
        text = one.written.text
        assert (
            write_changes(text, one.file, Changes(before=one.wanted, after=one.wanted)).text == text
        )


@NEEDS_ENGINES
@pytest.mark.slow
@pytest.mark.parametrize("kind", LIBRARIES)
def test_libraries_load_written_files_with_same_settings(kind, tmp_path):
    done = list(rounds(kind, 60))
    assert not [one.file for one in done if one.wrong()]
    reports = loaded(kind, done, tmp_path)
    assert {
        i: d
        for i, (one, report) in enumerate(zip(done, reports, strict=True))
        if (d := differing(one, report))
    } == {}
    assert all("precision" in report or "nnodes" in report for report in reports)


@NEEDS_ENGINES
@pytest.mark.slow
def test_trainer_and_deepspeed_files_agree_after_writing(tmp_path):
    found = mismatches(100, tmp_path)
    assert [differ for differ, _ in found if differ] == []
    assert any("bf16" in diff for _, diff in found)


def test_library_comparison_detects_a_difference():
    one = next(iter(rounds("DeepSpeed", 1)))
    stage = {s.name: s.value for s in parse_config(one.written.text, one.file).settings}[
        "micro_batch"
    ]
    assert differing(one, {"micro_batch": stage}) == {}
    assert differing(one, {"micro_batch": stage + 1}) == {"micro_batch": (stage + 1, stage)}
    assert differing(one, {"error": "no"})


HF = """# mine
per_device_train_batch_size: 4 # fits
gradient_accumulation_steps: 8
num_train_epochs: 1
"""


def test_only_changed_keys_are_edited():
    written = changed(HF, "a.yaml", micro_batch=16, accumulation=2)
    assert lines(written) == [
        "-per_device_train_batch_size: 4 # fits",
        "-gradient_accumulation_steps: 8",
        "+per_device_train_batch_size: 16 # fits",
        "+gradient_accumulation_steps: 2",
    ]
    assert lines(changed(HF, "a.yaml", precision="amp_bf16")) == ["+bf16: true"]
    assert changed(HF, "a.yaml").diff == ""


def test_hugging_face_writer_keeps_existing_key_names():
    text = json.dumps(
        {"num_train_epochs": 1, "gradient_checkpointing": False, "per_gpu_train_batch_size": 4}
    )
    data = json.loads(changed(text, "a.json", activation_checkpointing="full", micro_batch=2).text)
    assert data == {
        "num_train_epochs": 1,
        "gradient_checkpointing": True,
        "per_gpu_train_batch_size": 2,
    }


@pytest.mark.parametrize(
    ("text", "file", "fields", "name", "words"),
    [
        (
            HF,
            "a.yaml",
            {"activation_checkpointing": "selective"},
            "activation_checkpointing",
            "all or nothing",
        ),
        (HF, "a.yaml", {"nnodes": 2}, "nnodes", "launch command"),
        (HF, "a.yaml", {"precision": "bf16"}, "precision", "autocast only"),
        (HF, "a.yaml", {"zero_stage": 2}, "zero_stage", "needs a DeepSpeed file"),
        (HF, "a.yaml", {"channels_last": True}, "channels_last", "no key is written"),
        (
            '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}',
            "d.json",
            {"micro_batch": 2},
            "micro_batch",
            '"auto"',
        ),
        ('{"train_micro_batch_size_per_gpu": 4}', "d.json", {"pp": 2}, "pp", "PipelineModule"),
        ('{"zero_optimization": true}', "d.json", {"zero_stage": 2}, "zero_stage", "the old way"),
        ("trainer: {devices: auto}\n", "t.yaml", {"nproc_per_node": 4}, "nproc_per_node", "auto"),
        (
            "trainer: {devices: [2, 3]}\n",
            "t.yaml",
            {"nproc_per_node": 4},
            "nproc_per_node",
            "by hand",
        ),
        (
            "trainer: {devices: 1, strategy: fsdp}\n",
            "t.yaml",
            {"zero_stage": 2},
            "zero_stage",
            "another strategy",
        ),
        (
            "trainer: {devices: 1}\n",
            "t.yaml",
            {"precision": "tf32"},
            "precision",
            "set_float32_matmul_precision",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n",
            "a.yaml",
            {"zero_stage": 3},
            "zero_stage",
            "it is stated in ds.json",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 8\n",
            "a.yaml",
            {"compile": True},
            "compile",
            "does not pass it on",
        ),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 t.py", "c.sh", {"nnodes": 2}, "nnodes", "1:4"),
        (
            "torchrun --nproc-per-node gpu t.py",
            "c.sh",
            {"nproc_per_node": 4},
            "nproc_per_node",
            "known only when it runs",
        ),
        (
            "deepspeed --include a:0,1 t.py",
            "c.sh",
            {"nproc_per_node": 4},
            "nproc_per_node",
            "names the GPUs",
        ),
        (
            "x: &n 4\ntraining:\n  num_train_epochs: 1\n  per_device_train_batch_size: *n\n",
            "a.yaml",
            {"micro_batch": 2},
            "micro_batch",
            "an alias",
        ),
    ],
)
def test_unwritable_settings_are_reported_as_left(text, file, fields, name, words):
    written = changed(text, file, **fields)
    assert name in written.left
    assert written.text == text


def test_deepspeed_global_batch_is_updated():
    text = '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}'
    data = json.loads(changed(text, "d.json", micro_batch=8, accumulation=8).text)
    assert data == {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 8,
    }
    # DeepSpeed does not set the number of GPUs, but its global batch depends on it
    assert json.loads(changed(text, "d.json", nproc_per_node=16).text)["train_batch_size"] == 512


def test_lightning_validation_interval_follows_accumulation():
    text = "trainer:\n  accumulate_grad_batches: 8\n  val_check_interval: 800\n"
    written = changed(text, "t.yaml", accumulation=2)
    assert written.text == "trainer:\n  accumulate_grad_batches: 2\n  val_check_interval: 200\n"


@pytest.mark.parametrize(
    ("fields", "strategy"),
    [
        ({"zero_stage": 2}, "deepspeed_stage_2"),
        ({"zero_stage": 2, "offload_optimizer": True}, "deepspeed_stage_2_offload"),
        (
            {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
            "deepspeed_stage_3_offload",
        ),
    ],
)
def test_lightning_strategy_names_are_written(fields, strategy):
    assert (
        changed("trainer:\n  devices: 8\n", "t.yaml", **fields).text
        == f"trainer:\n  devices: 8\n  strategy: {strategy}\n"
    )


def test_lightning_strategy_section_is_written_if_no_name_exists():
    written = changed("trainer:\n  strategy: ddp\n", "t.yaml", zero_stage=3, offload_optimizer=True)
    values = {s.name: s.value for s in parse_config(written.text, "t.yaml").settings}
    assert values == {"zero_stage": 3, "offload_optimizer": True}


NEW = {
    "DeepSpeed": "ds.json",
    "accelerate": "accelerate.yaml",
    "torchrun": "launch.sh",
    "sbatch": "job.sbatch",
}
SBATCH = FILES["Slurm batch script"]["torchrun.sbatch"]


def test_slurm_variables_with_correct_values_are_not_edited():
    written = changed(SBATCH, "j.sbatch", before=Execution(), nnodes=2, nproc_per_node=4)
    assert lines(written) == [
        "-#SBATCH --nodes=1          # of 4",
        "+#SBATCH --nodes=2          # of 4",
        "-#SBATCH --gres=gpu:a100:1",
        "+#SBATCH --gres=gpu:a100:4",
    ]
    assert any("--rdzv-endpoint" in note for note in written.notes)


def test_command_in_quotes_is_edited_in_place():
    text = "#!/bin/bash\n#SBATCH --nodes=1\nsrun bash -c 'torchrun --nnodes=1 --nproc-per-node=8 t.py'\n"
    written = changed(text, "j.sh", before=Execution(nproc_per_node=8), nproc_per_node=4)
    assert written.text == text.replace("node=8", "node=4")


@pytest.mark.parametrize("head", ["", "#!/bin/bash\n#SBATCH --nodes=1\n"])
def test_command_in_variables_is_left_to_the_user(head):
    text = head + 'ARGS="--nproc-per-node 8"\ntorchrun $ARGS t.py\n'
    written = changed(text, "j.sh", before=Execution(nproc_per_node=8), nproc_per_node=4)
    assert written.text == text
    assert "nproc_per_node" in written.left


def test_time_limit_is_written_in_slurm_format():
    changes = Changes(before=Execution(), after=Execution(), time_limit_s=100_000)
    text = write_changes(SBATCH, "j.sbatch", changes).text
    assert "#SBATCH --time=1-03:46:40\n" in text
    assert {s.name: s.value for s in parse_config(text, "j").settings}["time_limit_s"] == 100_000


def test_sbatch_option_after_first_command_is_ignored():
    text = "#!/bin/bash\n#SBATCH --nodes=1\necho\n#SBATCH --gpus-per-node=8\nsrun python t.py\n"
    assert (
        "#SBATCH --gpus-per-node=8"
        in changed(text, "j.sh", before=Execution(), nproc_per_node=4).text
    )


def test_command_keeps_quotes_and_continuations():
    text = "torchrun --nnodes=1 \\\n  --nproc_per_node='8' \"my train.py\" --x 'a b' $(date +%s)\n"
    written = changed(text, "c.sh", nproc_per_node=4, nnodes=2)
    assert written.text == text.replace("--nnodes=1", "--nnodes=2").replace(
        "--nproc_per_node='8'", "--nproc_per_node=4"
    )


def test_accelerate_deepspeed_flag_replaces_multi_gpu():
    written = changed("accelerate launch --multi_gpu --num_processes 8 t.py", "c.sh", zero_stage=2)
    assert written.text == "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 2 t.py"


def test_each_setting_is_written_to_one_file():
    texts = {
        "args.yaml": HF,
        "ds.json": '{"train_batch_size": 256, "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 0}}',
        "job.sh": "torchrun --nproc_per_node 8 train.py --deepspeed ds.json\n",
    }
    after = replace(
        START,
        micro_batch=8,
        accumulation=2,
        nnodes=2,
        zero_stage=2,
        precision="amp_bf16",
        compile=True,
        pp=1,
    )
    done = rewrite(texts, Changes(before=START, after=after))
    assert done.left == {}
    new = {f.file: f.text for f in done.files}
    combined = combine([parse_config(text, file) for file, text in new.items()])
    assert combined.clashes == ()
    found = execution_of({n: s.value for n, s in combined.values.items()}, START)
    assert found == after
    assert "bf16: true\n" in new["args.yaml"]
    assert "bf16" not in new["ds.json"]  # one file is enough
    assert new["job.sh"] == "torchrun --nproc_per_node 8 --nnodes 2 train.py --deepspeed ds.json\n"


def test_deepspeed_precision_matches_trainer_file():
    texts = {
        "args.yaml": HF + "bf16: false\nfp16: false\n",
        "ds.json": '{"train_batch_size": 256, "bf16": {"enabled": false}, "fp16": {"enabled": false}}',
    }
    done = rewrite(texts, Changes(before=START, after=replace(START, precision="amp_bf16")))
    new = {f.file: f.text for f in done.files}
    assert json.loads(new["ds.json"])["bf16"] == {"enabled": True}
    assert "torch_autocast" not in new["ds.json"]
    assert combine([parse_config(text, file) for file, text in new.items()]).clashes == ()


def test_partition_activations_is_written_only_to_deepspeed():
    written = changed(FILES["DeepSpeed"]["ds.json"], "ds.json", partition_activations=True)
    assert '"partition_activations": true' in written.text
    assert (written.wrote, written.left) == (("partition_activations",), {})
    for kind in ("accelerate", "Lightning CLI", "Hugging Face TrainingArguments"):
        (file, text), *_ = FILES[kind].items()
        assert (
            "DeepSpeed's own file"
            in changed(text, file, partition_activations=True).left["partition_activations"]
        )


def test_setting_without_a_file_is_reported_once():
    done = rewrite(
        {"job.sh": "torchrun --nproc-per-node 8 t.py\n"},
        Changes(before=START, after=replace(START, zero_stage=2)),
    )
    assert list(done.left) == ["zero_stage"]
    assert done.files[0].diff == ""


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_new_files_state_the_execution(seed):
    import random

    e = execution(random.Random(seed))
    for kind, file in NEW.items():
        written = new_file(kind, e, file)
        read = parse_config(written.text, written.file)
        stated = {s.name: s.value for s in read.settings}
        wanted = settings_of(e)
        for name in written.wrote:
            if name in stated:
                assert stated[name] == wanted[name], (written.file, name)
        assert not stated.keys() & written.left.keys() - {"precision", "zero_stage"}
        assert written.before == ""
        assert combine([read]).clashes == () or written.left


def test_diff_marks_missing_newline_at_end_of_file():
    written = changed(HF.rstrip("\n"), "a.yaml", micro_batch=2)
    assert written.diff.endswith(" num_train_epochs: 1\n\\ no newline at end of file\n")
    assert changed(HF, "a.yaml").diff == ""


def test_backups_are_never_overwritten(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(HF.replace("\n", "\r\n").encode())
    path.chmod(0o640)
    for n, name in ((5, "a.yaml.bak"), (6, "a.yaml.bak2"), (7, "a.yaml.bak3")):
        old = path.read_bytes()
        text = read_text(str(path))
        assert save_all([changed(text, str(path), micro_batch=n)]) == [str(tmp_path / name)]
        assert (tmp_path / name).read_bytes() == old
        assert path.read_bytes().count(b"\r\n") == 4
        assert f"size: {n}".encode() in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.yaml",
        "a.yaml.bak",
        "a.yaml.bak2",
        "a.yaml.bak3",
    ]


def test_unchanged_file_is_not_written(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(HF)
    assert save_all([changed(HF, str(path))]) == [None]
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_concurrently_changed_file_is_not_overwritten(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(HF + "seed: 1\n")
    with pytest.raises(TrainpaceError):
        save_all([changed(HF, str(path), micro_batch=2)])
    assert path.read_text() == HF + "seed: 1\n"
    with pytest.raises(UnreadableInput, match="cannot read"):
        save_all([changed(HF, str(tmp_path / "none.yaml"), micro_batch=2)])


@pytest.mark.parametrize("trouble", ["changed meanwhile", "disk full"])
def test_files_are_written_all_or_none(trouble, tmp_path, monkeypatch):
    paths = [tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml")]
    for path in paths:
        path.write_text(HF)
    files = [changed(HF, str(path), micro_batch=2) for path in paths]
    if trouble == "changed meanwhile":
        paths[1].write_text(HF + "seed: 1\n")
        with pytest.raises(TrainpaceError):
            save_all(files)
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(HF) - 1, before[1]))
        try:
            with pytest.raises(UnreadableInput):
                save_all(files)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.yaml", "b.yaml", "c.yaml"]
    assert paths[0].read_text() == paths[2].read_text() == HF


def test_every_readable_format_has_a_writer():
    assert WRITERS.keys() == FILES.keys()
