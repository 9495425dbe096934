"""`trainpace loader`."""

from typing import Annotated

from trainpace.cli.command import View, command, echo_json
from trainpace.verbs.loader import LoaderRequest, run
from trainpace.verbs.request import Field


class LoaderView(View):
    """Where the measurement goes."""

    output: Annotated[str | None, Field("Also save the measurement here.", metavar="FILE.json")] = None


@command(LoaderRequest, LoaderView)
def loader(request: LoaderRequest, view: LoaderView) -> int:
    """Measure a DataLoader alone: samples/s over workers, where a sample's time goes, and the settings for this machine.

    NAME is a Dataset, a DataLoader or a task (model, loss, optimizer, dataset), its class, or a function that returns it. Of a
    task the compute is measured too, and a step is the later of data and compute. With --compute-ms the compute is taken to
    keep one core busy, as a GPU's host does.

    \b
    trainpace loader train.py:make_dataset --batch 64
    trainpace loader train.py:make_loader --compute-ms 40 --workers 0:8
    """
    from trainpace.records import save
    from trainpace.report import TerminalProgress, loader_json, print_loader
    from trainpace.verbs.places import check_writable

    if view.output:
        check_writable(view.output)
    answer = run(request, TerminalProgress())
    if view.output:
        save(answer.measurement, view.output)
    if view.json:
        echo_json(loader_json(answer.measurement, answer.advice))
    else:
        print_loader(answer.measurement, answer.advice)
    return 0
