"""`trainpace forecast`."""

from typing import Annotated

import click
from msgspec.structs import replace

from trainpace.cli.command import PicturedView, check_pictures, command, echo_json, save_pictures
from trainpace.verbs.forecast import ForecastRequest, run
from trainpace.verbs.request import Field


class ForecastView(PicturedView):
    """How forecasts are shown, and where the trace is kept."""

    save_workload: Annotated[
        str | None,
        Field("Keep the trace, in every number format, for forecasts in a moment.", metavar="FILE.json"),
    ] = None  # fmt: skip


@command(ForecastRequest, ForecastView)
def forecast(request: ForecastRequest, view: ForecastView) -> int:
    """Forecast step time, memory and cost of MODEL on GPUs you don't have, from its code alone.

    MODEL is a name (resnet50, vgg16, mobilenet_v2), torchvision:NAME, timm:NAME, transformers:CONFIG.json,
    FILE.py:FUNCTION (returning model, loss, optimizer, dataset), or a saved WORKLOAD.json.

    \b
    trainpace forecast resnet50 --gpu T4 --gpu A100 --gpu H100 --batch 64 --precision amp_fp16
    trainpace forecast vgg16 --gpu "RTX 3090" --batch 8:64:8
    trainpace forecast vgg16 --gpu T4 --batch 1:70
    trainpace forecast transformers:config.json --gpu H100 --num-gpus 8 --zero 3 --precision bf16 --checkpointing
    trainpace forecast llama.json --gpu H100 --num-gpus 8 --nodes 8 --network 400 --precision bf16 --tp 8 --pp 4
        (8 cards of 400 Gbit/s in each node are 400 GB/s)
    trainpace forecast resnet50 --gpu H100 --samples 1281167 --epochs 90 --price 2.50
    """
    from trainpace.records import to_jsonable
    from trainpace.report import TerminalProgress, print_forecasts

    check_pictures(view)
    answer = run(replace(request, save_workload=view.save_workload), TerminalProgress())
    rows, jumps = answer.rows, answer.jumps
    if view.json:
        shown_jumps = {name: [to_jsonable(jump) for jump in some] for name, some in jumps.items()}
        echo_json({
            "record": "Forecasts", "schema_version": 1, "rows": answer.to_dicts(), "journal": list(answer.notes),
            "jumps": shown_jumps,
        })  # fmt: skip
    else:
        print_forecasts(answer.sweeps[0].forecaster.workload, rows, jumps, answer.notes, request.model_name)
    if view.html or view.figure:
        from trainpace.report import forecast_page, forecast_pictures

        sweeps = answer.sweeps
        save_pictures(
            view, lambda: forecast_page(sweeps, jumps, answer.notes), lambda: forecast_pictures(sweeps, jumps)
        )
    if all(row.step is None for row in rows):
        for reason in dict.fromkeys(row.reason for row in rows if row.reason):
            click.echo(f"trainpace: not forecast: {reason}", err=True)
    return 0 if any(row.step is not None and row.fits is not False for row in rows) else 1
