"""`make run`: the whole loop once, on real photographs and on this machine.

Trace two small models, forecast them on this machine and on GPUs that are not here, really train
them for some seconds, and lay forecast and measurement side by side: in the terminal, and in
out/first_look.html.
"""

import argparse
from pathlib import Path

from msgspec.structs import replace

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import forecast_row
from trainpace.core.records import save, write_whole
from trainpace.core.units import format_number
from trainpace.forecast import CalibratedKernels, Forecaster, Target
from trainpace.measure import Conditions, calibrate, measure
from trainpace.report import Lines, page, show
from trainpace.report.measurement import side_by_side_sections
from trainpace.workload import Variant, load_workload

TASKS = Path(__file__).with_name("photo_tasks.py")
GPUS = ("T4", "RTX 3090", "A100", "H100")


def print_lines(*lines: str) -> None:
    show([Lines(lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=6.0, help="training time per batch size")
    parser.add_argument("--calibrate", type=float, default=40.0, help="seconds of micro-benchmarks")
    parser.add_argument("--output", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    print_lines(
        f"1. Measuring for {options.calibrate:.0f} s what this machine's CPU can do, without any of the models below"
    )
    machine = calibrate(options.calibrate)
    rows = []
    for name in ("cnn", "transformer"):
        spec = f"{TASKS}:{name}"
        print_lines(f"2. Tracing the {name}: its operators, without weights and without a GPU")
        workload = load_workload(spec, ("fp32",))
        on_cpu = load_workload(spec, ("fp32",), Variant(cpu=True))
        this_cpu = Forecaster(
            on_cpu, Target(Cluster(device=machine.device), CalibratedKernels(machine.kernels))
        )
        on_gpus = Forecaster(workload, Target(Cluster(device=find_device(GPUS[0]))))
        for batch in options.batches:
            print_lines(
                f"3. Training the {name} for {options.seconds:g} s on real photographs, batch {batch}"
            )
            measured = measure(Conditions(model=spec, seconds=options.seconds), batch)
            save(measured, options.output / f"{name}_batch_{batch}.json")
            here = this_cpu.forecast(Execution(micro_batch=batch))
            rows.append((replace(here, model=name, device="this CPU"), measured))
            for gpu in GPUS:
                there = on_gpus.on(Cluster(device=find_device(gpu))).forecast(
                    Execution(micro_batch=batch)
                )
                rows.append((replace(there, model=name, device=gpu), None))

    meaning = explain(rows, max(machine.spread, machine.drift))
    sections = list(side_by_side_sections(meaning, rows))
    show(sections)
    file = options.output / "first_look.html"
    data = [forecast_row(f) | {"measured_ms": m and m.median_ms} for f, m in rows]
    write_whole(file, page("Trainpace: a first look", sections, data))
    print_lines(f"The same with the parts of a step: {file}")
    print_lines(
        "Next: trainpace forecast resnet50 --gpu 'RTX 3090' --batch 8:64:8, or your own FILE.py:FUNCTION"
    )


def explain(rows, spread) -> list[str]:
    here = [(f, m.median_ms) for f, m in rows if m is not None]
    errors = sorted(100 * abs(f.step.total_ms / ms - 1) for f, ms in here)
    inside = sum(
        f.step_time_interval_ms.low <= ms <= f.step_time_interval_ms.high for f, ms in here
    )
    slow, slow_ms = max(here, key=lambda pair: pair[1])
    batch = slow.execution.micro_batch
    there = [
        f
        for f, m in rows
        if m is None and (f.model, f.execution.micro_batch) == (slow.model, batch)
    ]
    fastest = min(there, key=lambda f: f.step.total_ms)
    step_ms, interval = fastest.step.total_ms, fastest.step_time_interval_ms
    return [
        f"On this CPU the forecasts are {errors[0]:.0f} to {errors[-1]:.0f} % from what was then measured, and {inside} of"
        f" {len(here)} measurements lie inside their interval. The forecast knew the operators and this machine's"
        " micro-benchmarks, not the model's own time.",
        f"The same {slow.model} step of {slow_ms:.0f} ms at batch {batch} would take about"
        f" {format_number(step_ms)} ms on one {fastest.device} ({format_number(interval.low)} to"
        f" {format_number(interval.high)} ms), as far as its datasheet tells. Nothing was measured on a GPU.",
        "Models this small keep a large GPU waiting for launches: the fastest card is not always worth its price.",
        f"This machine was {'steady' if spread < 0.2 else 'noisy'} during the micro-benchmarks"
        f" (repeated passes differed by up to {100 * spread:.0f} %), which limits every comparison above.",
    ]


if __name__ == "__main__":
    main()
