"""Which of several statements applies: overrides, refused keys, named files, plain python."""

import json

import pytest

from trainpace.configs import agreed, combine, parse_command, parse_config, read_configs
from trainpace.core.errors import Contradiction
from trainpace.verbs.schedule import ScheduleRequest, run

ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_machines: 2\nnum_processes: 16\n"
CLI = "trainer:\n  devices: 4\n  num_nodes: {nodes}\n  accumulate_grad_batches: 8\n"
PYTHON_JOB = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH {tasks}\n#SBATCH --gpus-per-node=4\n{start}\n"


class Silent:
    def note(self, text):
        """Ignore it."""


def values(*files):
    return {name: setting.value for name, setting in agreed(files).values.items()}


def notes(*files):
    return " | ".join(note.text for note in combine(files).notes)


def test_flags_of_accelerate_launch_override_its_file():
    file = parse_config(ACCELERATE, "conf/acc.yaml")
    launch = "accelerate launch --config_file acc.yaml --num_processes {} train.py"
    command = parse_command(launch.format(8))
    assert values(file, command)["world_size"] == 8
    assert "--num-processes: 8 overrides 16 (conf/acc.yaml, num_processes)" in notes(file, command)
    assert "overrides" not in notes(file, parse_command(launch.format(16)))
    script = parse_config("#!/bin/bash\n#SBATCH --nodes=2\nsrun " + launch.format(8), "job.sh")
    assert values(file, script)["world_size"] == 8


def test_flags_of_a_script_override_the_file_that_its_config_flag_names():
    recipe = parse_config('{"num_train_epochs": 3, "learning_rate": 1e-4}', "recipe.yaml")
    flags = "accelerate launch --num_processes 8 sft.py --num_train_epochs 1"
    assert values(recipe, parse_command(f"{flags} --config conf/recipe.yaml"))["epochs"] == 1
    assert combine([recipe, parse_command(flags)]).clashes[0].name == "epochs"


@pytest.mark.parametrize("stated", [8, 4, "auto"])
def test_lightning_refuses_accumulation_in_a_deepspeed_file_whatever_its_value(stated):
    trainer = parse_config(CLI.format(nodes=1), "cli.yaml")
    text = json.dumps({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": stated})
    with pytest.raises(Contradiction) as refused:
        agreed([trainer, parse_config(text, "ds.json")])
    assert "Lightning does not start with gradient_accumulation_steps in ds.json" in str(
        refused.value
    )
    assert "Remove it" in str(refused.value)
    assert "agree" not in str(refused.value)


def test_plain_python_is_a_launch_command_of_one_process():
    for command in (
        "python train.py --bf16",
        "CUDA_VISIBLE_DEVICES=0 nohup python3 -u -m pkg.train",
    ):
        assert values(parse_command(command)) == {"nproc_per_node": 1}
    assert (
        values(parse_config(CLI.format(nodes=1), "c.yaml"), parse_command("python fit.py fit"))[
            "nproc_per_node"
        ]
        == 4
    )
    clash = combine([parse_config(ACCELERATE, "a.yaml"), parse_command("python t.py")]).clashes
    assert "1 (command, python)" in clash[0].text


@pytest.mark.parametrize(
    ("tasks", "start", "warned"),
    [
        ("--ntasks-per-node=4", "python fit.py", True),
        ("--ntasks=8", "exec python fit.py", True),
        ("--ntasks-per-node=4", "srun python fit.py", False),
        ("--ntasks-per-node=4", "python prepare.py\nsrun python fit.py", False),
        ("--ntasks-per-node=4", "mpirun python fit.py", False),
        ("--ntasks-per-node=4", "python -m accelerate.commands.launch fit.py", False),
    ],
)
def test_batch_script_without_srun_starts_one_process(tasks, start, warned):
    job = parse_config(PYTHON_JOB.format(tasks=tasks, start=start), "job.sbatch")
    assert ("one process starts, not 8" in notes(job)) == warned
    assert (values(job).get("nproc_per_node") == 1) == warned
    trainer = parse_config(CLI.format(nodes=2), "cli.yaml")
    assert values(job, trainer)["nproc_per_node"] == 4
    assert ("one process starts, not 8" in notes(job, trainer)) == warned


def test_named_files_are_read_if_they_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = "srun accelerate launch --config_file acc.yaml train.py --per_device_train_batch_size 4"
    (tmp_path / "job").mkdir()
    job = tmp_path / "job/j.sbatch"
    job.write_text(PYTHON_JOB.format(tasks="--ntasks-per-node=1", start=start))
    assert "acc.yaml is a separate settings file" in notes(*read_configs([str(job)]))
    assert values(*read_configs([str(job)]))["nproc_per_node"] == 4  # One per reserved GPU.
    (tmp_path / "job/acc.yaml").write_text(ACCELERATE.replace("16", "8"))
    files = read_configs([str(job)])
    assert values(*files)["world_size"] == 8
    assert "read too" in notes(*files)
    assert "separate settings file" not in notes(*files)
    assert len(read_configs([str(job), str(tmp_path / "job/acc.yaml")])) == 2


def test_wrong_batch_names_each_file_and_the_assumed_process(tmp_path):
    ds = tmp_path / "ds.json"
    ds.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,'
        ' "gradient_accumulation_steps": 1}'
    )
    asked = {"config": (str(ds),), "samples": 100, "epochs": 1.0, "step_time": 1.0}
    with pytest.raises(Contradiction) as refused:
        run(ScheduleRequest(**asked), Silent())
    for words in (f"8 ({ds}, train_batch_size)", "size 1 (assumed,", "deepspeed --num_gpus 4"):
        assert words in str(refused.value)
    assert run(ScheduleRequest(**asked, nproc_per_node=4), Silent()).answer.time is not None
