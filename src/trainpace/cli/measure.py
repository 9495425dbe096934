"""`trainpace measure`."""

import json
from typing import Annotated

import click
from msgspec.structs import replace

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, save_pictures, typed_words
from trainpace.verbs import measure as one_model
from trainpace.verbs import suite as many_models
from trainpace.verbs.places import check_writable
from trainpace.verbs.request import Field, Misuse
from trainpace.verbs.suite import SuiteRequest


class MeasureView(PicturedView):
    """How a sweep is shown."""

    output: Annotated[str | None, Field("Also save the measurements here.", metavar="FILE.json")] = None


@command(SuiteRequest, MeasureView)
def measure(request: SuiteRequest, view: MeasureView) -> int:
    """Train MODEL for some steps on this machine at several batch sizes, each probe in a process of its own, and time them.

    Prints the step time with the interval that a repeat should fall into, the jumps, the batch with the best throughput and
    the largest that fits, beside the forecast. Every probe goes into the journal at once: Ctrl-C keeps what is done, and
    the same command takes it up again.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    random:cnn:SEED (or mlp, rnn, transformer), or FILE.py:FUNCTION, where FUNCTION returns (model, loss, optimizer, dataset).

    \b
    trainpace measure resnet50 --batch 1,2,4
    trainpace measure examples/photo_tasks.py:cnn --batch 1:70
    trainpace measure train.py:task --batch 64 --noise-scale
    trainpace measure vgg16 --device cuda --batch 1:70 --html vgg16.html
    trainpace measure resnet50 --device cuda --until-oom
    trainpace measure --suite random --suite-size 100
    trainpace measure --suite classic --launcher slurm --partition gpu --device cuda
    """
    from trainpace.report import TerminalProgress

    many_models.check(request)
    check_pictures(view)
    if view.output:
        check_writable(view.output)
    request = replace(request, command=" ".join(typed_words()))
    if request.is_one_model_here:
        _show(one_model.run(request, TerminalProgress()), request.model, view)
        return 0
    for name in ("output", "html", "figure", "json"):
        if getattr(view, name):
            raise Misuse(f"--{name} is for one model here; trainpace journal export has the suite's runs.")
    answer = many_models.run(request, TerminalProgress())
    device = f" on {answer.device}" if answer.device else ""
    stored = "" if request.no_journal else " Kept in the journal: trainpace journal list"
    click.echo(f"{answer.measured} of {answer.models} models measured{device}.{stored}")
    return 0 if answer.measured else 1


def _show(sweep: one_model.MeasuredSweep, model: str | None, view: MeasureView) -> None:
    from trainpace.records import to_jsonable, write_whole
    from trainpace.report import print_sweep, sweep_json

    if view.output:
        write_whole(view.output, json.dumps([to_jsonable(m) for m in sweep], indent=1) + "\n")
    shown = (sweep.measurements, sweep.analysis, sweep.forecasts, sweep.causes)
    if view.html or view.figure:
        from trainpace.report import sweep_page, sweep_pictures

        save_pictures(view, lambda: sweep_page(*shown), lambda: sweep_pictures(*shown))
    if view.json:
        echo_json(sweep_json(sweep.measurements, sweep.analysis, sweep.forecasts, sweep.sweep))
    else:
        print_sweep(*shown, sweep.sweep, model)
