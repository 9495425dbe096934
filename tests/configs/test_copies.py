"""Copies of settings files for a trial redirect outputs and refer to each other."""

import json

import pytest
import yaml

from trainpace.configs import copied_command, copied_text, names_file, split_command
from trainpace.core.errors import TrainpaceError

COPIES = {"args.json": "/t/args.json", "conf/ds.json": "/t/ds.json"}


def command(text):
    return copied_command(split_command(text).words, COPIES, "/home/u", "/t/out")


def test_copied_command_uses_copied_files_and_trial_output():
    assert command(
        "torchrun train.py args.json --deepspeed=conf/ds.json --output_dir runs --save {out}/x"
    ) == (
        "torchrun",
        "train.py",
        "/t/args.json",
        "--deepspeed=/t/ds.json",
        "--output_dir",
        "/t/out",
        "--save",
        "/t/out/x",
    )
    assert command("python t.py --output-dir=a --config ./args.json --lr 0.1")[2:] == (
        "--output-dir=/t/out",
        "--config",
        "/t/args.json",
        "--lr",
        "0.1",
    )
    assert command("python t.py /home/u/args.json other/args.json")[2:] == (
        "/t/args.json",
        "other/args.json",
    )


def test_paths_may_contain_equals_sign():
    copies = {"runs/lr=1/a.yaml": "/t/a.yaml"}
    words = (
        "python",
        "t.py",
        "--output_dir=exp/lr=0.1",
        "--config=runs/lr=1/a.yaml",
        "--save={out}/lr=1",
        "--lr=0.1",
    )
    assert copied_command(words, copies, "/home/u", "/t/out")[2:] == (
        "--output_dir=/t/out",
        "--config=/t/a.yaml",
        "--save=/t/out/lr=1",
        "--lr=0.1",
    )
    assert copied_command(("runs/lr=1/a.yaml",), copies, "/home/u", "/t/out") == ("/t/a.yaml",)
    assert names_file({}, words, "runs/lr=1/a.yaml", "/home/u")


def test_variables_before_command_become_environment():
    found = split_command("OMP_NUM_THREADS=2 X='a b' torchrun train.py --lr=1")
    assert found.environment == {"OMP_NUM_THREADS": "2", "X": "a b"}
    assert found.words == ("torchrun", "train.py", "--lr=1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "A=1",
        "python a.py && python b.py",
        "python t.py $HOME",
        "bash run.sh",
        "sbatch job.sh",
        "python 'a",
        "python t.py > log",
        "python `which t`",
    ],
)
def test_split_command_rejects_shell_syntax(text):
    with pytest.raises(TrainpaceError):
        split_command(text)


def test_copied_training_arguments_redirect_output_and_disable_resume():
    text = json.dumps(
        {
            "output_dir": "runs",
            "per_device_train_batch_size": 8,
            "deepspeed": "conf/ds.json",
            "push_to_hub": True,
            "resume_from_checkpoint": "runs/checkpoint-5",
            "logging_dir": "logs",
            "learning_rate": 0.1,
        }
    )
    found = json.loads(copied_text(text, "args.json", COPIES, "/home/u", "/t/out"))
    assert found == {
        "output_dir": "/t/out",
        "per_device_train_batch_size": 8,
        "deepspeed": "/t/ds.json",
        "push_to_hub": False,
        "resume_from_checkpoint": False,
        "logging_dir": "/t/out",
        "learning_rate": 0.1,
    }
    own = "# mine\ntraining:\n  per_device_train_batch_size: 8  # samples\n  num_train_epochs: 3\nmodel: x\n"
    copied = copied_text(own, "all.yaml", COPIES, "/home/u", "/t/out")
    assert yaml.safe_load(copied)["training"]["output_dir"] == "/t/out"
    assert "# mine" in copied


def test_copied_lightning_and_deepspeed_files_redirect_output():
    text = "trainer:\n  max_epochs: 3\n  devices: 1\n"
    assert (
        yaml.safe_load(copied_text(text, "c.yaml", {}, "/", "/t/out"))["trainer"][
            "default_root_dir"
        ]
        == "/t/out"
    )
    text = '{"train_batch_size": 8, "tensorboard": {"enabled": true, "output_path": "here"}}'
    found = json.loads(copied_text(text, "ds.json", {}, "/", "/t/out"))
    assert found == {
        "train_batch_size": 8,
        "tensorboard": {"enabled": True, "output_path": "/t/out"},
    }


def test_names_file_is_false_for_unreferenced_file():
    args = {
        "args.json": '{"per_device_train_batch_size": 8, "deepspeed": "ds.json"}',
        "ds.json": '{"train_batch_size": 8}',
    }
    assert names_file(args, ("python", "t.py", "args.json"), "args.json", ".")
    assert names_file(args, ("python", "t.py", "args.json"), "ds.json", ".")
    assert not names_file(
        {"ds.json": args["ds.json"]}, ("python", "t.py", "args.json"), "ds.json", "."
    )
