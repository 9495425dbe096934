"""`trainpace calibrate`."""

from typing import Annotated

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.calibrate import CalibrateRequest, machine_of, run, run_hosts
from trainpace.verbs.request import Field
from trainpace.verbs.units import ABOVE_0, within


class CalibrateView(View):
    """What part of the machine is wanted."""

    hosts: Annotated[bool, Field("Under torchrun: only the links between hosts, into the profile that is there.")] = (
        False
    )
    network: Annotated[
        float | None,
        Field("For --hosts: the link's bandwidth, where it is known.", within("GB/s", ABOVE_0, 1e6), metavar="GB/S"),
    ] = None
    detect_only: Annotated[bool, Field("Say what machine this is, and measure nothing.")] = False


@command(CalibrateRequest, CalibrateView)
def calibrate(request: CalibrateRequest, view: CalibrateView) -> int:
    """Measure what this machine's CPU can do, for a minute, and keep it for forecasts.

    Small blocks of layers are trained, every operator timed on its own; then whole random networks, for what lies between
    operators. `trainpace forecast MODEL --gpu cpu` and `trainpace measure` use the profile from then on. Nothing else should
    run meanwhile: it says how steady the machine was.

    \b
    trainpace calibrate
    trainpace calibrate --ranks 2 --storage /data
    torchrun --nnodes 2 ... -m trainpace calibrate --hosts
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_host_links, print_machine, print_profile

    file = str(request.profile_file)
    if view.hosts:
        links = run_hosts(request, view.network)
        if links is not None and view.json:
            echo_json(to_jsonable(links))
        elif links is not None:
            print_host_links(links, file)
        return 0
    progress = TerminalProgress()
    machine = machine_of(request, progress)
    if not view.json:
        print_machine(machine)
    elif view.detect_only:
        echo_json(to_jsonable(machine))
    if view.detect_only:
        return 0
    profile = run(request, progress, machine)
    if view.json:
        echo_json(to_jsonable(profile))
    else:
        print_profile(profile, file)
    return 0
