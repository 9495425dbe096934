"""`trainpace gpus`."""

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.gpus import GpusRequest, run


@command(GpusRequest, View)
def gpus(request: GpusRequest, view: View) -> int:
    """List the hardware catalogue, or one device with the source of every figure.

    \b
    trainpace gpus
    trainpace gpus "NVIDIA GeForce RTX 3090"
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_catalogue, print_device

    devices = run(request, TerminalProgress()).devices
    if view.json:
        rows = [to_jsonable(device) for device in devices]
        echo_json(rows if request.name is None else rows[0])
    elif request.name is None:
        print_catalogue(devices)
    else:
        print_device(devices[0])
    return 0
