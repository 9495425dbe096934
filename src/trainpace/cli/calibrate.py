"""`trainpace calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpace.cli.options import COUNT, DURATION, echo_json
from trainpace.errors import TrainpaceError

if TYPE_CHECKING:
    from trainpace.machine import Machine, MachineProfile


@click.command()
@click.option("--seconds", type=DURATION, default="1min", show_default=True, help="Time for the micro-benchmarks.")
@click.option("--ranks", type=COUNT, help="Also time all-reduce between so many processes on this machine.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True, help="For --ranks.")
@click.option("--storage", metavar="FOLDER", help="Also write and read a quarter of a gigabyte in this folder.")
@click.option(
    "--hosts", is_flag=True, help="Under torchrun: only the links between hosts, into the profile that is there."
)
@click.option(
    "--network", type=click.FloatRange(0, min_open=True), metavar="GB/S",
    help="For --hosts: the link's bandwidth, where it is known.",
)  # fmt: skip
@click.option("--output", metavar="FILE.json", help="Where to leave the profile, in place of the user's data folder.")
@click.option("--detect-only", is_flag=True, help="Say what machine this is, and measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def calibrate(seconds: float, ranks: int | None, backend: Any, storage: str | None, **o: Any) -> int:
    """Measure what this machine's CPU can do, for a minute, and keep it for forecasts.

    Small blocks of layers are trained, every operator timed on its own; then whole random networks, for what lies between
    operators. `trainpace forecast MODEL --gpu cpu` and `trainpace measure` use the profile from then on. Nothing else should
    run meanwhile: it says how steady the machine was.

    \b
    trainpace calibrate
    trainpace calibrate --ranks 2 --storage /data
    torchrun --nnodes 2 ... -m trainpace calibrate --hosts
    """
    from msgspec.structs import replace

    from trainpace.machine import detect, warnings_of
    from trainpace.records import to_jsonable
    from trainpace.report.machine import print_machine, print_profile
    from trainpace.verbs.places import default_profile_file

    target = Path(o["output"]) if o["output"] else default_profile_file()
    if o["output"] and not target.resolve().parent.is_dir():
        raise click.UsageError(f"the folder of {target} does not exist.")
    if o["hosts"]:
        return _calibrate_hosts(target, o["network"], o["as_json"])
    machine = detect()
    if storage is not None:
        from trainpace.machine import measure_storage

        machine = replace(machine, storage=measure_storage(storage))
    if not o["as_json"]:
        print_machine(machine)
    for warning in warnings_of(machine):
        click.echo(f"note: {warning}", err=True)
    if o["detect_only"]:
        if o["as_json"]:
            echo_json(to_jsonable(machine))
        return 0
    profile = profile_of(seconds, machine, ranks, backend, target)
    if o["as_json"]:
        echo_json(to_jsonable(profile))
    else:
        print_profile(profile, str(target))
    return 0


def profile_of(seconds: float, machine: Machine, ranks: int | None, backend: Any, target: Path) -> MachineProfile:
    """Measure this machine, and leave its profile at `target`."""
    from msgspec.structs import replace

    from trainpace.machine import calibrate as measure_machine
    from trainpace.records import save
    from trainpace.report.progress import Bar

    click.echo(f"measuring for about {seconds:.0f} s; let nothing else run", err=True)
    with Bar("calibrating", seconds=seconds):
        profile = measure_machine(seconds, machine)
    if ranks is not None:
        from trainpace.machine import measure_allreduce

        with Bar(f"timing all-reduce between {ranks} processes") as bar:
            bar.to(0)
            profile = replace(profile, allreduce=measure_allreduce(ranks, backend))
    target.parent.mkdir(parents=True, exist_ok=True)
    save(profile, target)
    return profile


def _calibrate_hosts(target: Path, gb_per_s: float | None, as_json: bool) -> int:
    """Rank 0 puts the links into the profile that an earlier `trainpace calibrate` left."""
    from msgspec.structs import replace

    from trainpace.machine import MachineProfile, measure_host_links
    from trainpace.records import load, save, to_jsonable
    from trainpace.report.machine import print_host_links

    if not target.exists():
        raise TrainpaceError(f"there is no profile at {target} to put the links into.", "First: trainpace calibrate")
    profile = load(target, MachineProfile)
    links = measure_host_links(gb_per_s)
    if links is None:
        return 0
    save(replace(profile, host_links=links), target)
    if as_json:
        echo_json(to_jsonable(links))
    else:
        print_host_links(links, str(target))
    return 0
