"""Tests of shell completion and of the modules that it imports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainpace.verbs import SUMMARIES

HEAVY = {
    "torch",
    "rich",
    "jinja2",
    "sqlalchemy",
    "yaml",
    "matplotlib",
    "transformers",
    "scipy",
    "pandas",
}
ASK = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); from trainpace.cli import main; main()"


def complete(line, shell="bash"):
    """Return the completions of the last word and the imported modules."""
    words = line.split(" ")
    environment = dict(
        os.environ,
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
        _TRAINPACE_COMPLETE=f"{shell}_complete",
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in done.stderr.split()}
    return done.stdout.splitlines(), modules


@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("trainpace ", [f"plain,{verb}" for verb in SUMMARIES], ["plain,resnet50"]),
        ("trainpace fo", ["plain,forecast", "file,fo"], ["plain,match"]),
        ("trainpace resn", ["plain,resnet50", "file,resn"], []),
        ("trainpace --he", ["plain,--help"], []),
        ("trainpace forecast --gp", ["plain,--gpu"], ["plain,--batch"]),
        ("trainpace forecast --gpu rtx-30", ["plain,RTX-3090"], ["plain,T4"]),
        ("trainpace forecast vgg", ["plain,vgg16"], ["plain,resnet50"]),
        ("trainpace plan --precision amp", ["plain,amp_bf16"], ["plain,fp32"]),
        ("trainpace match --by ", ["plain,hours"], []),
        ("trainpace match --machines la", ["file,la"], []),
        ("trainpace precompute --out ", ["dir,"], []),
        ("trainpace journal sh", ["plain,show", "plain,share"], ["plain,list"]),
        ("trainpace nonsense --o", [], ["plain,--output"]),
    ],
)
def test_completion_suggests_verbs_models_and_options(line, wanted, unwanted):
    found, modules = complete(line)
    assert set(wanted) <= set(found)
    assert not set(unwanted) & set(found)
    assert modules & HEAVY <= ({"sqlalchemy"} if "journal" in line else set())


def test_completed_gpu_names_are_known_gpus():
    from trainpace.core.hardware import find_device

    cards = [line.removeprefix("plain,") for line in complete("trainpace forecast --gpu ")[0]]
    assert len(cards) > 100
    assert len({find_device(card).name for card in cards}) == len(cards)


def test_completing_verbs_imports_no_heavy_modules():
    assert not complete("trainpace ")[1] & (HEAVY | {"msgspec", "numpy"})


def test_zsh_completion_includes_summaries():
    lines = complete("trainpace ", "zsh")[0]
    assert lines[lines.index("forecast") + 1] == SUMMARIES["forecast"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_works_in_bash():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = """
        eval "$(_TRAINPACE_COMPLETE=bash_source trainpace)"
        complete -p trainpace
        COMP_WORDS=(trainpace forecast --gpu RTX-309); COMP_CWORD=3
        _trainpace_completion trainpace; printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_trainpace_completion trainpace" in done.stdout.splitlines()[0]
    assert {"RTX-3090", "RTX-3090-Ti"} <= set(done.stdout.split())
