"""Tests of command lines without a verb."""

import json

import pytest

from trainpace.cli.program import as_config, main, meant
from trainpace.core.errors import TrainpaceError
from trainpace.verbs import SUMMARIES

CONFIGURATIONS = {
    "llama.json": (
        {"model_type": "llama"},
        ["forecast", "transformers:llama.json", "--batch", "8"],
    ),
    "unet.json": (
        {"_class_name": "UNet2DModel", "_diffusers_version": "0.30"},
        ["forecast", "diffusers:unet.json", "--batch", "8"],
    ),
    "workload.json": ({"record": "Workload"}, ["forecast", "workload.json", "--batch", "8"]),
    "ds.json": ({"train_batch_size": 8}, ["schedule", "--config", "ds.json", "--batch", "8"]),
    "list.json": ([1], ["schedule", "--config", "list.json", "--batch", "8"]),
}


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["train.py", "--epochs", "3"], "look"),
        (["python", "train.py"], "look"),
        (["/usr/bin/python3.12", "-m", "train"], "look"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "look"),
        (["resnet50", "--gpu", "T4"], "forecast"),
        (["timm:vit_base_patch16_224"], "forecast"),
        (["train.py:task", "--gpu", "T4"], "forecast"),
    ],
)
def test_scripts_run_look_and_models_run_forecast(words, verb):
    assert meant(words, tuple(SUMMARIES)) == [verb, *words]


def test_settings_files_of_schedule_need_no_option():
    typed = [
        "schedule",
        "a.sbatch",
        "--config",
        "b.json",
        "--solve-gpus",
        "c.yaml",
        "--html=d.json",
    ]
    assert as_config(typed) == [
        *("schedule", "--config", "a.sbatch", "--config", "b.json"),
        *("--solve-gpus", "--config", "c.yaml", "--html=d.json"),
    ]


def test_options_before_a_script_are_passed_to_look(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = {}
    for name in ("train.py", "absent.py"):
        (tmp_path / "train.py").write_text("raise SystemExit(7)")
        with pytest.raises(SystemExit) as ended:
            main(["--epochs", "3", name])
        said[name] = ended.value.code, capsys.readouterr().err
    assert said["train.py"][0] == 7
    assert "before its second training step" in said["train.py"][1]
    assert said["absent.py"][0] == 2
    assert "No such option" in said["absent.py"][1]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_config_file_type_is_detected_from_its_content(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, wanted = CONFIGURATIONS[name]
    (tmp_path / name).write_text(json.dumps(content))
    assert meant([name, "--batch", "8"], tuple(SUMMARIES)) == wanted


def test_recording_folder_is_shown_with_watch(tmp_path):
    (tmp_path / "command.json").write_text("{}")
    assert meant([str(tmp_path)], tuple(SUMMARIES)) == ["watch", "--from", str(tmp_path)]


@pytest.mark.parametrize(("word", "near"), [("forcast", "forecast"), ("resnet51", "resnet50")])
def test_mistyped_word_gets_the_nearest_verb_or_model(word, near):
    with pytest.raises(TrainpaceError, match=word) as raised:
        meant([word], tuple(SUMMARIES))
    assert near in raised.value.hint


def test_model_without_gpu_is_forecast_on_common_gpus(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["resnet18", "--batch", "8", "--json", "--evidence", "none"])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    rows = rows["rows"] if isinstance(rows, dict) else rows
    assert {row["gpu"] for row in rows} == {
        "RTX 3090",
        "RTX 4090",
        "T4",
        "A100 SXM 40GB",
        "H100 SXM",
    }


def test_trainpace_without_arguments_prints_an_introduction(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "trainpace train.py" in said
    assert len(said.splitlines()) <= 24
