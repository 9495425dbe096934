"""Every type of input file, with a valid example and the command that reads it."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from entries import entry, sweep
from hostile.commands import command
from made_logs import simple_run
from made_traces import COMPUTING, EXCHANGING, events_of, trace_of, write_nsight
from nouns import every_noun, machine_profile, measurement, stacked
from shard_folders import write_folder
from trainpace.core.records import to_json
from trainpace.journal import Journal, export
from trainpace.measure import suite
from trainpace.plan import Plan
from trainpace.run import read_ladder
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.traced import documents_of
from trainpace.watch import PARTS

EXAMPLES = Path(__file__).parents[2] / "examples"
FORECAST = ("--gpu", "T4", "--batch", "8")
SCHEDULE = ("schedule", "--config", "FILE", "--samples", "50000", "--step-time", "10ms")
MORE = {
    "accelerate.yaml": ("--micro-batch", "8", "--epochs", "1"),
    "deepspeed.json": ("--epochs", "1"),
    "code.py": ("--epochs", "1"),
    "launch.sh": ("--micro-batch", "8", "--epochs", "1"),
    "job.sbatch": ("--micro-batch", "8", "--epochs", "1"),
}
TABLE = """model_spec,gpu,num_gpus,precision,batch_per_gpu,grad_accum,seq_len,img_size,optimizer,parallelism,mode,step_time_ms,samples_per_sec,peak_mem_gib,file,notes
resnet18,T4,1,fp32,64,1,,224,sgd,,train,210.5,,3.1,somewhere,a note
resnet50,A100,8,amp_fp16,64,1,,224,sgd,ddp,train,98.25,,,somewhere,
gpt2,V100,1,fp16,8,2,1024,,adamw,,train,,31.5,,elsewhere,
"""
TRAINER_STATE = {
    "global_step": 20,
    "epoch": 1.0,
    "max_steps": 20,
    "train_batch_size": 8,
    "num_train_epochs": 1,
    "log_history": [
        {"loss": 1.5, "step": 10},
        {
            "train_runtime": 12.5,
            "train_samples_per_second": 64.0,
            "train_steps_per_second": 1.6,
            "step": 20,
        },
    ],
}
LAUNCH = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\n#SBATCH --time=2-00:00:00\nsrun torchrun --nproc-per-node 4 --nnodes 2 train.py --batch-size 32 --epochs 3\n"
CODE = 'from transformers import TrainingArguments\nargs = TrainingArguments(output_dir="o", per_device_train_batch_size=8, gradient_accumulation_steps=4, bf16=True)\n'
MACHINES = (
    '[[machine]]\nname = "lab"\ndevice = "A100"\ncount = 4\nprice = 3.2\nnetwork_gb_per_s = 12.5\n'
)
PROJECT = 'gpu = ["T4", "A100"]\nbatch = 8\nprecision = "amp_fp16"\nsamples = "50k"\nepochs = 3\njournal = "team.db"\n\n[forecast]\nprice = 1.2\n'
GPU = """[sources]
sheet = { kind = "datasheet", title = "a test" }

[[gpu]]
name = "Mine"
vendor = "NVIDIA"
architecture = "Turing"
compute_capability = "7.5"
form_factor = "PCIe"
sms = 30
boost_clock_mhz = 1680
fp32_tflops = 6.45
fp16_tensor_tflops = 25.8
memory_gib = 6
memory_bandwidth_gb_per_s = 336
l2_mib = 3
pcie_generation = 3
pcie_lanes = 16
tdp_w = 160
"""


class FileType(NamedTuple):
    """A type of input file.

    `form` names the parser in mutations.PARSERS, or is "" for bytes. `beside` holds other required
    files.
    """

    name: str
    form: str
    example: bytes
    run: Callable[[Path], None]
    beside: Mapping[str, bytes] = {}


def reading(read: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that calls a reader directly.

    All readers report errors in the same way.
    """
    from trainpace.core.errors import TrainpaceError
    from trainpace.report import tell

    def run(file: Path) -> None:
        try:
            read(file)
        except TrainpaceError as error:
            tell(error)

    return run


def read_lengths(file: Path) -> None:
    assert documents_of(
        ForecastRequest(model="gpt2", lengths=str(file), packed=True, sequence_length=1024)
    )


def _folder_of(command_: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda file: command_(file.parent)


def _started_beside(command_: Callable[[Path], None]) -> Callable[[Path], None]:
    def run(file: Path) -> None:
        with contextlib.chdir(file.parent):
            command_(file)

    return run


@cache
def file_types() -> dict[str, FileType]:
    """Return the file types by name."""
    nouns = every_noun()
    plan = next(n for n in nouns if isinstance(n, Plan))
    state = json.dumps(TRAINER_STATE).encode()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        with Journal.open(str(place / "journal.db")) as journal:
            everything = [sweep(), *(entry(batch=b, step_time_ms=3.0 + b) for b in range(1, 6))]
            journal.add_many(everything)
            export(place / "runs.json", everything)
            export(place / "runs.csv", everything)
        sqlite3.connect(place / "journal.db").execute(
            "PRAGMA wal_checkpoint(TRUNCATE)"
        ).connection.close()
        simple_run(
            place,
            world_size=1,
            cpus=2,
            threads=2,
            torch="2.13.0",
            parts={i: [1] * len(PARTS) for i in range(20)},
        )
        log = next(place.glob("process-*.trail"))
        pyarrow.parquet.write_table(
            pyarrow.csv.read_csv(pyarrow.py_buffer(TABLE.encode())), place / "table.parquet"
        )
        shards = write_folder(place / "shards", [{"x": float(i)} for i in range(6)], 3, 2)
        kept = {f.name: f.read_bytes() for f in shards.iterdir()}
        read = {f.name: f.read_bytes() for f in place.iterdir() if f.is_file()}
        report = write_nsight(place / "report.sqlite", [COMPUTING, EXCHANGING], 3).read_bytes()
        foreign = sqlite3.connect(place / "journal.db")
        foreign.execute("PRAGMA journal_mode=DELETE").connection.close()
        read["foreign.db"] = (place / "journal.db").read_bytes()
    about = json.dumps(
        {"command": ["python", "train.py"], "seconds": 1.0, "exit_code": 0, "trials": None}
    ).encode()
    configs = {
        "deepspeed.json": (
            "json",
            b'{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        ),
        "arguments.json": (
            "json",
            b'{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_train_epochs": 3, "bf16": true, "deepspeed": "ds.json"}',
        ),
        "arguments.yaml": (
            "yaml",
            b"per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nnum_train_epochs: 3\nbf16: true\n",
        ),
        "accelerate.yaml": (
            "yaml",
            b"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\n",
        ),
        "lightning.yaml": (
            "yaml",
            b"trainer:\n  max_epochs: 3\n  devices: 4\n  num_nodes: 2\n  precision: bf16-mixed\n  accumulate_grad_batches: 2\n  strategy: ddp\ndata:\n  batch_size: 32\n",
        ),
        "launch.sh": ("", LAUNCH.encode()),
        "job.sbatch": ("", LAUNCH.encode()),
        "code.py": ("", CODE.encode()),
    }
    measured = to_json(measurement())
    types = [
        FileType(
            "workload.json",
            "json",
            to_json(stacked()).encode(),
            command("forecast", "FILE", *FORECAST),
        ),
        FileType(
            "profile.json",
            "json",
            to_json(machine_profile()).encode(),
            command("forecast", "resnet18", "--batch", "8", "--calibrated", "FILE"),
        ),
        FileType(
            "machines.toml", "toml", MACHINES.encode(), command("offers", "--machines", "FILE")
        ),
        FileType(
            "devices.toml",
            "toml",
            GPU.encode(),
            command("forecast", "resnet18", "--gpu", "Mine", "--batch", "8", "--hardware", "FILE"),
        ),
        FileType(
            "fleet.toml",
            "toml",
            b'gpu = "A100"\nnum_gpus = 4\nnodes = 2\nnetwork_gb_per_s = 12.5\nprice = 1.5\n',
            command(
                "plan",
                "resnet18",
                "--batch",
                "32",
                "--cluster",
                "FILE",
                "--samples",
                "50000",
                "--epochs",
                "1",
            ),
        ),
        FileType(
            "trainpace.toml",
            "toml",
            PROJECT.encode(),
            _started_beside(command("forecast", "resnet18")),
        ),
        FileType(
            "noise.json",
            "json",
            json.dumps(
                [msgspec.json.decode(measured) | {"noise_scale": {"scale": {"samples": 300.0}}}]
            ).encode(),
            command(
                "plan",
                "resnet18",
                "--batch",
                "32",
                "--gpu",
                "T4",
                "--samples",
                "50000",
                "--epochs",
                "1",
                "--allow-global-batch",
                "--noise-scale",
                "FILE",
            ),
        ),
        FileType("lengths.txt", "", b"100\n512\n1024\n77\n" * 5, reading(read_lengths)),
        FileType("lengths.csv", "csv", b"length\n100\n512\n1024\n77\n", reading(read_lengths)),
        FileType("table.csv", "csv", TABLE.encode(), command("validate", "FILE")),
        FileType("table.parquet", "", read["table.parquet"], command("validate", "FILE")),
        *(
            FileType(
                f"import.{name}",
                form,
                data,
                command("journal", "import", "FILE", "--journal", "journal.db", *more),
                {},
            )
            for name, form, data, more in (
                ("csv", "csv", read["runs.csv"], ()),
                ("json", "json", read["runs.json"], ()),
                ("table.csv", "csv", TABLE.encode(), ()),
                ("trainer_state.json", "json", state, ("--device", "T4", "--precision", "fp32")),
                ("mlflow.db", "", read["foreign.db"], ("--format", "mlflow")),
                ("shared.json", "json", (EXAMPLES / "shared_runs.json").read_bytes(), ()),
                ("measured.json", "json", b"[" + measured.encode() + b"]", ()),
            )
        ),
        FileType(
            "journal.db", "", read["journal.db"], command("journal", "list", "--journal", "FILE")
        ),
        FileType(
            "command.json",
            "json",
            about,
            _folder_of(command("watch", "--from", "FILE", "--timeline")),
            {log.name: read[log.name]},
        ),
        FileType(
            log.name,
            "",
            read[log.name],
            _folder_of(command("diagnose", "FILE")),
            {"command.json": about},
        ),
        FileType(
            "trace.json",
            "json",
            json.dumps(trace_of(events_of(EXCHANGING, 3), 0, 2)).encode(),
            command("diagnose", "FILE"),
        ),
        FileType("report.sqlite", "", report, command("diagnose", "FILE")),
        *(
            FileType(name, form, data, command(*SCHEDULE, *MORE.get(name, ())))
            for name, (form, data) in configs.items()
        ),
        *(
            FileType(
                name,
                "json" if name.endswith(".json") else "",
                kept[name],
                _folder_of(command("precompute", "--verify", "--out", "FILE")),
                {other: content for other, content in kept.items() if other != name},
            )
            for name in sorted(kept)
            if name in ("plan.json", "manifest.json", "shard-000001.json", "shard-000001.parquet")
        ),
        FileType(
            "ladder.toml",
            "toml",
            (EXAMPLES / "ladder" / "ladder.toml").read_bytes(),
            reading(lambda f: read_ladder(f)),
        ),
        FileType(
            "ladder.plan.json",
            "json",
            to_json(plan).encode(),
            reading(lambda f: read_ladder(f, "train.py:task")),
        ),
        FileType(
            "suite.toml",
            "toml",
            b'[[task]]\nmodel = "resnet18"\nbatch = [1, 2, 4]\n',
            reading(lambda f: suite(str(f))),
        ),
    ]
    return {t.name: t for t in types}
