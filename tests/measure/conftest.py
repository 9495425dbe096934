"""Fixtures that build the simulated accelerator once and make it visible to processes started by a test."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainpace

HERE = Path(__file__).parent / "simulated"
BUILT = Path(__file__).parents[2] / ".sim"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def library() -> Path:
    import torch

    source = HERE / "device.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    BUILT.mkdir(exist_ok=True)
    built = BUILT / f"{digest}.so"
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            compiler = shutil.which("g++") or pytest.fail(
                "the simulated accelerator needs g++ (apt install g++)"
            )
            torch_folder = Path(torch.__file__).parent
            include = torch_folder / "include"
            aside = built.with_suffix(".part")
            subprocess.run(
                [
                    compiler,
                    "-std=c++20",
                    "-O1",
                    "-shared",
                    "-fPIC",
                    f"-I{include}",
                    f"-I{include}/torch/csrc/api/include",
                    str(source),
                    "-o",
                    str(aside),
                    f"-L{torch_folder / 'lib'}",
                    "-ltorch_cpu",
                    "-lc10",
                ],
                check=True,
            )
            aside.rename(built)
    return built


@pytest.fixture
def simulated(library, tmp_path) -> Run:
    """Run a command with the simulated accelerator, next to the files of tasks/. Keywords are settings of device.cpp and pynvml.py."""
    tasks = Path(__file__).parent / "tasks"
    for file in tasks.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    folders = (Path(trainpace.__file__).parents[1], HERE, tasks)

    def run(*command: object, **settings: object) -> subprocess.CompletedProcess[str]:
        around = {
            **os.environ,
            "SIM_LIBRARY": str(library),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
        }
        if any(name.startswith("nvml") for name in settings):
            around["PYTHONPATH"] = os.pathsep.join(
                [str(HERE.parent / "nvml"), around["PYTHONPATH"]]
            )
        settled = {f"SIM_{name.upper()}": str(value) for name, value in settings.items()}
        return subprocess.run(
            [str(part) for part in command],
            env={**around, **settled},
            cwd=tmp_path,
            text=True,
            capture_output=True,
            timeout=300,
        )

    return run
