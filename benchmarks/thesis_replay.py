"""The thesis replayed by one command: an unchanged Lightning script on four nodes of a real Slurm, rung by rung.

Run as root on a machine that does nothing else: PYTHONPATH=.engines python benchmarks/thesis_replay.py [--quick]. Brings the
cluster up (planted/slurm_cluster.py: network namespaces whose links have a known speed, each node with the same share of this
machine's cores), calibrates one node and the links of two, and runs `trainpace run examples/thesis/ladder.toml --launcher slurm`,
from a control group with a node's share of the cores, since forecasts take nodes to be as the machine that asks. About eight
minutes on two cores. Kept in benchmarks/results/thesis_replay.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULT = HERE / "results" / "thesis_replay.md"
LADDER = ROOT / "examples" / "thesis" / "ladder.toml"
PHOTOS, COUNT, SIDE = ROOT / "out" / "thesis-photos", 480, 448
sys.path.insert(0, str(HERE / "planted"))

import cpu_share  # noqa: E402
import netns  # noqa: E402
import slurm_cluster  # noqa: E402

from trainpace.report.run import markdown  # noqa: E402

NODES = 4
CORES_OF_A_NODE = 0.45
"""Four nodes and the machine that asks them have two cores together, with a little to spare."""
MBIT_PER_S = 250.0
QUIET = 1.5
BUSY = "**taken on a busy machine: load {:.1f}**"
LINKS = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=0 WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=node1 MASTER_PORT=29611;"
    f" exec trainpace calibrate --hosts --network {MBIT_PER_S / 8e3}"
)


def example(file: str) -> dict[str, Any]:
    """What a file of examples/ defines."""
    return runpy.run_path(str(ROOT / "examples" / file))


def environment(folder: str) -> dict[str, str]:
    """The user's own profile and journal are left alone; `python` and `trainpace` are those that run this."""
    return {
        **os.environ,
        "XDG_DATA_HOME": folder,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": netns.INTERFACE,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT / ".engines"), os.environ.get("PYTHONPATH")))
        ),
        "COLUMNS": "200",
    }


def replay(options: argparse.Namespace) -> tuple[dict[str, Any], str, dict[str, float]]:
    """The ladder's answer, its table in Markdown, and the seconds that each part took."""
    took: dict[str, float] = {}

    def run(name: str, *words: str, **streams: Any) -> str:
        print(f"{name} ...", file=sys.stderr, flush=True)
        begin = time.monotonic()
        done = subprocess.run(
            words, cwd=ROOT, env=around, text=True, stdout=subprocess.PIPE, check=True, **streams
        )
        took[name] = time.monotonic() - begin
        return done.stdout

    if not PHOTOS.is_dir():
        example("face_crops.py")["make_photos"](PHOTOS, COUNT, SIDE)
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_cluster.cluster(NODES, cpus=1, mbit_per_s=MBIT_PER_S, cores=CORES_OF_A_NODE),
        cpu_share.share(f"asking-{os.getpid()}", CORES_OF_A_NODE) as asking,
    ):
        around = environment(folder)
        if not options.no_forecast:
            run(
                "calibrating a node",
                "srun",
                "-N1",
                "-n1",
                "trainpace",
                "calibrate",
                "--seconds",
                options.calibration,
            )
            run("timing the links of two nodes", "srun", "-N2", "-n2", "bash", "-c", LINKS)
        words = [
            "--launcher",
            "slurm",
            "--out",
            f"{folder}/run",
            "--no-journal",
            "--markdown",
            f"{folder}/t.md",
            "--json",
        ]
        words += ["--steps", str(options.steps)] if options.steps else []
        words += ["--no-forecast"] if options.no_forecast else []
        answer = run(
            "the ladder", *asking, "trainpace", "run", str(LADDER.relative_to(ROOT)), *words
        )
        return json.loads(answer), Path(folder, "t.md").read_text(), took


def notes(answer: dict[str, Any], took: dict[str, float]) -> list[str]:
    """What the table does not say by itself."""
    start = answer["ladder"]["start"]["execution"]
    batches = {
        e["micro_batch"] * e["accumulation"] * e["nnodes"] * e["nproc_per_node"]
        for rung in answer["rungs"]
        for tried in rung["tried"]
        if (e := tried["setup"]["execution"])
    }
    before = start["micro_batch"] * start["accumulation"]
    same = batches == {before}
    shards = sum(rung["precompute_s"] for rung in answer["rungs"])
    return [
        f"- The global batch {'stays' if same else 'changes from'} {before}"
        f"{' in every rung' if same else f' to {sorted(batches - {before})}'}; losses are compared with the baseline's.",
        f"- Each node, and the machine that asks, has {CORES_OF_A_NODE:g} of this machine's {os.cpu_count()} cores by a control"
        f" group's quota, so that {NODES} nodes have {NODES} equal shares; links of {MBIT_PER_S:.0f} Mbit/s. These are no GPUs:"
        " the ratios are of this cluster, not the thesis'.",
        "- 16 bits are bf16, which DeepSpeed trains in on a CPU (it refuses fp16 there); it keeps the weights in fp32 beside"
        " them, and exchanges gradients and weights in 16 bits.",
        f"- The photographs were made into shards once, in {shards:.0f} s at the share of one node.",
        f"- It took {', '.join(f'{name} {s:.0f} s' for name, s in took.items())}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="short trials, no forecasts, result not kept"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="of a trial, in place of the ladder's own"
    )
    parser.add_argument("--calibration", default="20s", help="of one node")
    options = parser.parse_args()
    options.no_forecast = options.quick
    options.steps = options.steps or (8 if options.quick else 0)
    for why in (slurm_cluster.missing(), netns.missing(), cpu_share.missing()):
        if why:
            raise SystemExit(f"no cluster here: {why}")
    load = os.getloadavg()[1]
    answer, table, took = replay(options)
    lines = [
        "# The thesis replayed (`python -m benchmarks thesis`, as root)",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, lightning"
        f" {version('lightning')}, deepspeed {version('deepspeed')}, gloo; "
        f"{BUSY.format(load) if load > QUIET else f'load {load:.1f}'} (5 min, before it began)."
        " `trainpace run examples/thesis/ladder.toml --launcher slurm` on four nodes of a real Slurm; the script is unchanged.",
        "",
        table.rstrip(),
        "",
        *notes(answer, took),
        "",
        "## The thesis' own table",
        "",
        markdown(example("ladder/thesis.py")["thesis_table"]()),
    ]
    text = "\n".join(lines).replace(f"{ROOT}/", "")
    print(text)
    if not options.quick:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
