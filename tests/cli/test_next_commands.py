"""Every printed "Next" command runs and keeps the conditions of the first command."""

import contextlib
import io
import json
import os
import re
import shlex

import click
import pytest
from click.core import ParameterSource

from nouns import workload
from scenes import GOLDEN, OTHERS
from trainpace.cli import main
from trainpace.cli.program import _cli
from trainpace.core.hardware import find_device
from trainpace.core.records import save
from trainpace.report import show
from trainpace.workload import packaged_names

RUN_HERE = {"forecast", "plan", "match", "schedule", "journal", "gpus"}
"""Commands to run. The others train or use the network and are only parsed."""
TOLD_APART = {
    "gpu",
    "batch",
    "name",
    "json",
    "details",
    "output",
    "checkpoint_every",
    "mtbf",
    "refresh",
}
"""Options that are compared separately or may differ between two commands."""


def printed(words, place):
    out = io.StringIO()
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as ended,
    ):
        main(words)
    assert ended.value.code in (0, 1), words
    return out.getvalue()


def next_commands(text):
    """Return the words of each "Next" command, with continued lines joined."""
    joined = text.replace(" \\\n", " ")
    return [
        shlex.split(re.sub(r"  \(.*", "", line))
        for line in re.findall(r"^Next: (trainpace .*)$", joined, re.MULTILINE)
    ]


def parsed(words):
    """Return the parsed context of a command line and its explicit options."""
    group, name, *rest = _cli, *words
    command = group.get_command(click.Context(group), name)
    assert command is not None, name
    if isinstance(command, click.Group):
        name, *rest = rest
        command = command.get_command(click.Context(command), name)
    context = command.make_context(name, list(rest))
    stated = {
        n: v
        for n, v in context.params.items()
        if context.get_parameter_source(n) == ParameterSource.COMMANDLINE
    }
    return context, stated


def cards(stated):
    gpus = stated["gpu"] if isinstance(stated["gpu"], tuple) else (stated["gpu"],)
    return {find_device(gpu).name for gpu in gpus}


def check_conditions(asked, following):
    (_, before), (context, after) = parsed(asked), parsed(following)
    for name, value in before.items():
        if name in context.params and name not in TOLD_APART:
            assert after.get(name) in (
                value,
                (value,),
                *(value if isinstance(value, tuple) else ()),
            ), name
    if "gpu" in before and "gpu" in after and asked[0] != "match":
        assert cards(after) <= cards(before)
    if following[0] == "measure":
        assert after["model"] in packaged_names() or re.match(
            r"(timm|torchvision|transformers|random):|.*\.py:", after["model"]
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("next")
    save(workload(), folder / "model.json")
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    (folder / "runs.csv").write_text(
        "model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms\nresnet50,T4,fp32,32,300\nresnet50,T4,fp32,64,600\n"
    )
    printed(["journal", "import", "runs.csv", "--journal", "own.db"], folder)
    return folder


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
FLEET = "--gpu A100 --num-gpus 8 --nodes 2 --network 25"
COMMANDS = [
    "forecast resnet50",
    "forecast resnet50 --gpu T4 --batch 8,16 --precision amp_fp16 --optimizer adamw --image-size 224 --journal own.db",
    "forecast resnet50 --gpu T4 --batch 100000",
    "forecast resnet50 --gpu 'RTX 3090' --host 'EPYC 7742' --compile --channels-last",
    f"forecast resnet50 {FLEET} --zero 1 --precision amp_bf16 --batch 64 --accumulate 2 --no-journal",
    f"forecast resnet50 {FLEET} --samples 1281167 --epochs 90 --price 2.5 --startup 2min --journal own.db",
    f"forecast model.json {FLEET} --zero 3 --precision amp_bf16",
    "forecast model.json --gpu T4 --batch 4 --clip-gradients --no-journal",
    "forecast model.json --gpu T4 --samples 1000 --epochs 1 --startup 100h --no-journal",
    "match resnet50 --samples 1.28M --epochs 90 --global-batch 512 --optimizer adamw --journal own.db",
    "match resnet50 --samples 50k --epochs 2 --compile --gpu T4 --max-nodes 1 --no-journal",
    "match model.json --samples 1000 --epochs 1 --loader-rate 100 --no-journal",
    "match transformers:llama.json --tokens 1M --max-steps 1000 --gpu T4 --max-nodes 1",
    "forecast transformers:llama.json --tokens 1M --max-steps 1000 --gpu T4",
    "match model.json --samples 1.28M --epochs 90 --global-batch 4096 --gpu H100 --evaluation-samples 50000 --by hours",
    "plan resnet50 --gpu A100 --num-gpus 4 --batch 64 --samples 1281167 --epochs 90 --keep precision",
    f"plan model.json {FLEET} --zero 3 --samples 100000 --epochs 3 --journal own.db --output kept.json",
    "schedule --samples 1281167 --epochs 90 --global-batch 256 --deadline 24h",
    "schedule --samples 50k --epochs 2 --global-batch 128 --step-time 80ms --budget '$20' --price 1.20",
    "journal list --journal own.db",
    "journal list --journal own.db --sweeps",
    "journal list --public --limit 3",
    "journal import runs.csv --journal own.db",
    "journal score --journal own.db",
    "gpus T4",
    "offers --gpu H100 --provider aws",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_next_command_keeps_the_conditions_of_the_first(command, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    asked = shlex.split(command)
    following = next_commands(printed(asked, place))
    assert following or asked[:3] == ["journal", "list", "--journal"]
    with contextlib.chdir(place):
        for _, *words in following:
            check_conditions(asked, words)
            if words[0] in RUN_HERE:
                printed(words, place)


CHANGED = [
    "forecast resnet50 --global-batch 64",
    "forecast model.json --gpu T4 --batch 100000 --global-batch 100000",
    "match model.json --samples 1000 --epochs 1 --precision fp8 --precision bf16 --fp8-recipe block",
]
"""Commands with an option that has no meaning in the command that follows."""


@pytest.mark.parametrize("command", CHANGED)
def test_next_command_leaves_out_options_that_it_would_refuse(command, place):
    following = next_commands(printed(shlex.split(command), place))
    assert following
    for _, *words in following:
        assert not {"--global-batch", "--fp8-recipe"} & {*words}
        printed(words, place)


def test_public_run_without_own_counterpart_has_no_next_command(place):
    show = ["journal", "show", "public:e8dbbd8898", "--journal"]
    assert not next_commands(printed([*show, "missing.db"], place))
    assert not (place / "missing.db").exists()
    (following,) = next_commands(printed([*show, "own.db"], place))
    printed(following[1:], place)


@pytest.mark.parametrize(
    "options",
    [
        ["--batch", "1,2,4,8", "--global-batch", "16"],
        ["--batch", "8", "--accumulate", "3", "--global-batch", "16"],
        ["--num-gpus", "3", "--tp", "2"],
        ["--num-gpus", "4", "--pp", "2", "--virtual-stages", "2"],
    ],
)
def test_conflicting_options_are_reported_before_tracing(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["forecast", "transformers:there_is_no_such_file.json", *options])
    assert ended.value.code == 2
    assert "no_such_file" not in capsys.readouterr().err


def test_next_command_of_a_journal_keeps_the_journal_path(place):
    (listed,) = next_commands(printed(["journal", "list", "--journal", "own.db"], place))
    (shown,) = next_commands(printed(listed[1:], place))
    assert shown[1:3] == ["journal", "compare"]
    assert shown[-2:] == ["--journal", "own.db"]
    printed([word if word != "ID" else shown[3] for word in shown[1:]], place)


@pytest.mark.parametrize("name", [*GOLDEN, *OTHERS])
def test_next_commands_of_sample_answers_parse(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show((GOLDEN | OTHERS)[name](), details=False)
    for _, *words in next_commands(out.getvalue()):
        if words[0] in ("watch", "diagnose") or not any(
            os.path.sep in word or word.endswith(".json") for word in words
        ):
            parsed(words)


def test_schedule_of_files_suggests_a_plan_from_the_same_files(tmp_path):
    script = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=60\nsrun torchrun --nnodes 2 --nproc-per-node 4 t.py"
    flags = "--per_device_train_batch_size 2 --max_seq_length 1000 --num_train_epochs 1"
    (tmp_path / "j.sbatch").write_text(f"{script} {flags}\n")
    text = printed(["schedule", "j.sbatch", "--tokens", "1M"], tmp_path)
    (command,) = next_commands(text)
    assert command[1:3] == ["plan", "transformers:config.json"]
    with contextlib.chdir(tmp_path):
        _, stated = parsed(command[1:])
    assert (stated["config"], stated["tokens"]) == (("j.sbatch",), 10**6)
