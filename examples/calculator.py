"""The Training Cost Calculator's own experiment by one command (`python examples/calculator.py`).

Step times of five image networks over batch sizes 1 to 70: measured on this machine, and forecast
on the Calculator's four cards. Is the step linear in the batch, where does it jump and why, which
batch is best? All runs are kept in a journal, published ones beside them; it predicts a card that
it has no run of, and names the best server for a whole training.
"""

import argparse
import sys
from pathlib import Path

import trainpace
from trainpace.core.records import write_whole
from trainpace.forecast import case_of, read_runs
from trainpace.journal import import_file
from trainpace.offers import SNAPSHOT_KNOWN_ON
from trainpace.report import (
    forecast_sections,
    forecast_title,
    page,
    show,
    sweep_json,
    sweep_sections,
    sweep_title,
    sweep_verdict,
)
from trainpace.report.match import cheapest_and_fastest, server
from trainpace.report.phrases import duration, interval, number, plural, usd
from trainpace.report.sections import Column, Lines, Next, Table, named, words
from trainpace.report.steps import jumps_in_words
from trainpace.verbs.request import BATCHES

HERE = Path(__file__).parent
MODELS = ("vgg16", "vgg19", "resnet50", "mobilenet_v1", "mobilenet_v2")
CARDS = ("K80", "P100", "V100", "T4")
SHOWN_SIZES = (1, 16, 32, 64)
IMAGENET_SAMPLES, EPOCHS = 1_281_167, 90


def print_lines(*lines: str) -> None:
    show([Lines(lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="built-in names, or timm:NAME")
    parser.add_argument(
        "--sizes", default="1:70", help="batch sizes, as in trainpace measure (default 1:70)"
    )
    parser.add_argument(
        "--image", type=int, default=32, help="side of the measured images; forecasts are at 224"
    )
    parser.add_argument(
        "--seconds",
        default="1s",
        help="training time of a probe, at least eight steps (default 1s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what is measured")
    parser.add_argument("--journal", type=Path, default=Path("out/calculator/journal.db"))
    parser.add_argument(
        "--first", type=Path, default=HERE / "profet_t4.csv", help="published runs that are kept"
    )
    parser.add_argument(
        "--second",
        type=Path,
        default=HERE / "profet_k80.csv",
        help="runs to be predicted from those",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="leave part 1 out, which takes long"
    )
    options = parser.parse_args()
    try:
        options.sizes = BATCHES.parse(options.sizes)
        options.journal.parent.mkdir(parents=True, exist_ok=True)
        cases = [case_of(run, options.second.parent) for run in read_runs(options.second)]
        for model in options.models:  # a wrong name should show now, and not after ten minutes
            trainpace.trace(model)
        if not options.no_measure:
            measured_here(options)
        forecast_on_cards(options)
        kept(options)
        second_device_predicted(options, cases)
        best_server(options)
    except trainpace.TrainpaceError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("\nStopped. What was measured is in the journal.")


def sweep_columns(sizes: tuple[int, ...]) -> list[Column]:
    """What is said of a sweep, whether it was measured or forecast."""
    at = [
        Column(f"ms at {size}", rank)
        for size, rank in zip(shown_sizes(sizes), (2, 4, 3, 0), strict=False)
    ]
    jumps = [
        words("jumps after", least=6),
        words("by %", 2, least=4),
        words("good again at", 2, least=4),
    ]
    shape, best = words("shape", 1, least=6), Column("best batch", 1)
    return [words("model", least=8), words("on", least=4), *at, shape, *jumps, best]


def sweep_cells(sizes, step_ms: dict[int, float], shape: str, jumps, best: int | None) -> list[str]:
    """`step_ms` by batch size: where one is missing, the nearest stands there and says so."""
    seen = [(size, nearest(step_ms, size)) for size in shown_sizes(sizes)] if step_ms else []
    at = [number(step_ms[got]) + ("" if got == size else f" ({got})") for size, got in seen]
    each = [
        (str(j.before), f"{100 * j.excess_ms / j.before_ms:.0f}", str(j.next_good or "none"))
        for j in jumps
    ]
    of_jumps = map(", ".join, zip(*each, strict=True)) if each else "---"
    return [*(at or "-" * len(shown_sizes(sizes))), shape, *of_jumps, str(best or "-")]


def shown_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(nearest(sizes, size) for size in SHOWN_SIZES))


def nearest(sizes, wanted: int) -> int:
    return min(sizes, key=lambda size: abs(size - wanted))


def measured_here(options) -> None:
    print_lines(
        f"1. Measured here, on images of {options.image} x {options.image}, each probe in a process of its own"
    )
    rows, said = [], []
    for model in options.models:
        sweep = trainpace.measure(
            model,
            batch=options.sizes,
            image_size=options.image,
            seconds=options.seconds,
            device=options.device,
            journal=str(options.journal),
            no_forecast=options.device == "cpu",
        )
        a = sweep.analysis
        shape, best = (
            ("-", None) if a.trend is None or a.too_noisy else (a.trend.shape, a.best.best.batch)
        )
        cells = sweep_cells(
            options.sizes, {p.batch: p.step_ms for p in a.points}, shape, sweep.jumps, best
        )
        least = "-" if a.curve.least_jump is None else f"{100 * a.curve.least_jump:.0f} %"
        failing = ", ".join(str(failure.batch) for failure in a.failures) or "-"
        rows.append([model, options.device, *cells, least, failing])
        said.append((model, " ".join(sweep_verdict(a, sweep.causes))))
        said += [("", f"Batch {failure.batch} failed: {failure.reason}") for failure in a.failures]
        text = page(sweep_title(sweep), sweep_sections(sweep), sweep_json(sweep))
        write_whole(options.journal.parent / f"{Path(model).stem}_measured.html", text)
    columns = [*sweep_columns(options.sizes), Column("least jump seen", 1)]
    show([Table([*columns, words("failing", 2, least=4)], rows), named("", said)])


def forecast_on_cards(options) -> None:
    print_lines(
        "2. Forecast on the Calculator's cards, on images of 224 x 224, from the models' code alone"
    )
    rows, jumps, notes = [], [], {}
    for model in options.models:
        found = trainpace.forecast(model, gpu=CARDS, batch=options.sizes, no_journal=True)
        for card, sweep in zip(CARDS, found.sweeps, strict=True):
            device = sweep.rows[0].device
            fitting = [f for f in sweep.rows if f.step is not None and f.fits is not False]
            steps = {f.execution.micro_batch: f.step.total_ms for f in fitting}
            trend, here = found.trends.get(device), found.jumps.get(device, ())
            shape, best = (trend.shape, trend.best_batch) if trend else ("-", None)
            rows.append([model, card, *sweep_cells(options.sizes, steps, shape, here, best)])
            jumps += [(f"{model} on {card}", jump) for jump in here]
        notes |= dict.fromkeys(found.notes)
        text = page(forecast_title(found), forecast_sections(found), found.as_json())
        write_whole(options.journal.parent / f"{Path(model).stem}_forecast.html", text)
    show([Table(sweep_columns(options.sizes), rows)])
    if jumps:
        where, largest = max(jumps, key=lambda each: each[1].excess_ms / each[1].before_ms)
        mechanisms = " and ".join(sorted({jump.mechanism or "not known" for _, jump in jumps}))
        print_lines(f"{plural(len(jumps), 'jump')}; cause: {mechanisms}. The largest, {where}:")
        print_lines(*jumps_in_words([largest], {}))
    print_lines(*notes, f"Every sweep as a picture: {options.journal.parent}/*.html", "")


def kept(options) -> None:
    with trainpace.journal(str(options.journal)) as journal:
        new = import_file(journal, options.first).new
        runs, sweeps = journal.count(), journal.sweeps()
    print_lines(
        f"3. Kept: {plural(runs, 'run')}, those of {plural(len(sweeps), 'sweep')} measured here and published ones"
        f" ({options.first.name}: {new} new)"
    )
    show([Next(["trainpace", "journal", "list", "--journal", str(options.journal)])])


def second_device_predicted(options, cases) -> None:
    cards = ", ".join(dict.fromkeys(case.cluster.device.name for case in cases))
    print_lines(
        f"4. {cards} predicted from the journal, beside published runs that are not in it ({options.second.name})"
    )
    rows, errors, notes, inside = [], [], {}, 0
    for case in cases:
        e, card = case.execution, case.cluster.device.name
        asked = {
            "gpu": card,
            "batch": e.micro_batch,
            "precision": e.precision,
            "optimizer": e.optimizer,
            "image_size": case.variant.image_size,
            "software": case.software.framework,
        }
        alone = trainpace.forecast(case.spec, **asked, no_journal=True)
        found = trainpace.forecast(case.spec, **asked, journal=str(options.journal))
        both = [each.rows[0].step.total_ms for each in (alone, found)]
        errors.append([ms / case.measured_ms - 1 for ms in both])
        cells = [
            f"{number(ms)} ({100 * error:+.0f} %)"
            for ms, error in zip(both, errors[-1], strict=True)
        ]
        between = found.rows[0].step_time_interval_ms
        inside += between.low <= case.measured_ms <= between.high
        rows.append(
            [
                case.spec,
                card,
                str(e.micro_batch),
                number(case.measured_ms),
                *cells,
                interval(between),
            ]
        )
        notes |= dict.fromkeys(found.notes)
    heads = ("batch", "measured ms", "from the code alone", "by the journal", "90% interval")
    show([Table([words("model"), words("on", 1, least=4), *map(Column, heads)], rows)])
    without, with_it = (
        100 * sum(map(abs, each)) / len(cases) for each in zip(*errors, strict=True)
    )
    print_lines(
        f"Mean error: {without:.0f} % from the code alone, {with_it:.0f} % by the journal, whose interval holds {inside} of the"
        f" {plural(len(cases), 'measured step')}.",
        *notes,
        "",
    )


def best_server(options) -> None:
    model = options.models[0]
    print_lines(
        f"5. The best server for {EPOCHS} epochs of ImageNet's {IMAGENET_SAMPLES:,} images with {model}"
    )
    job = {
        "samples": IMAGENET_SAMPLES,
        "epochs": EPOCHS,
        "precision": ("fp32", "amp_fp16", "amp_bf16"),
    }
    matches = trainpace.match(model, **job, journal=str(options.journal)).matches
    alone = {(m.offer, m.nodes): m for m in trainpace.match(model, **job, no_journal=True).matches}
    of_cards = [
        next((m for m in matches if m.offer.device.split()[0] == card), None) for card in CARDS
    ]
    rows = []
    for m in {m.offer: m for m in (matches[0], *of_cards) if m}.values():
        times = [
            duration(3600 * each.mean_hours) if each else "-"
            for each in (m, alone.get((m.offer, m.nodes)))
        ]
        price = usd(m.nodes * m.offer.price_usd_per_hour)
        rows.append([server(m), m.forecast.execution.precision, price, usd(m.mean_usd), *times])
    heads = (Column("$/h"), Column("cost"), Column("time"), Column("without the journal", 1))
    show([Table([words("server", least=20), words("run in", 2), *heads], rows)])
    corrected = sum(m.forecast.provenance == "transferred" for m in matches)
    print_lines(
        *cheapest_and_fastest(matches),
        f"The journal's runs correct {corrected} of {plural(len(matches), 'option')}. Prices are of the packaged offers: those"
        f" without a date as known on {SNAPSHOT_KNOWN_ON}; `trainpace offers --refresh` fetches today's.",
    )


if __name__ == "__main__":
    main()
