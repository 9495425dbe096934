"""After `calibrate`: ten models that the calibration never ran, forecast and then measured, in the same run."""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster
from trainpace.core.outcome import Forecast
from trainpace.forecast import CalibratedKernels, Forecaster, Measured, Target, observe
from trainpace.measure import Conditions, calibrate, measure
from trainpace.workload import Variant, load_workload

CALIBRATION_S = 60.0
PROBE_S = 1.5
PROBES = 2
PHOTOS = Path(__file__).parents[1] / "examples" / "photo_tasks.py"
_GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 6}
_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}


def ten_models() -> list[str]:
    """Rows: the calibration, each model, and the summary."""
    profile = calibrate(CALIBRATION_S)
    target = Target(Cluster(device=profile.device), CalibratedKernels(profile.kernels))
    lines = [
        f"| calibration of {CALIBRATION_S:.0f} s: drift / spread of the machine meanwhile | {100 * profile.drift:.0f} % /"
        f" {100 * profile.spread:.0f} % | |"
    ]
    errors, inside, others, others_inside = [], 0, [], 0
    with tempfile.TemporaryDirectory() as folder:
        for spec, batch, more, length in _models(Path(folder)):
            variant = Variant("sgd_momentum", length, cpu=True)
            workload = load_workload(spec, ("fp32",), variant)
            conditions = Conditions(
                model=spec, optimizer="sgd_momentum", sequence_length=length, seconds=PROBE_S
            )

            forecaster = Forecaster(workload, target)

            def foresee(n: int, forecaster: Forecaster = forecaster) -> Forecast:
                return forecaster.forecast(Execution(micro_batch=n))

            foreseen = foresee(batch)
            probes = sorted(
                (measure(conditions, batch) for _ in range(PROBES)), key=lambda m: m.median_ms
            )
            middle = probes[PROBES // 2]
            measured = middle.median_ms
            ratio, within = _compare(foreseen, measured)
            assert foreseen.step is not None
            known = observe(forecaster, Execution(micro_batch=batch), measured, middle.step)
            assert known is not None
            errors.append(abs(1 / ratio - 1))
            inside += within
            there = []
            for n in more:
                sharp = forecaster.knowing(Measured((known,), "this run")).forecast(
                    Execution(micro_batch=n)
                )
                again = statistics.median(measure(conditions, n).median_ms for _ in range(PROBES))
                off, held = _compare(sharp, again)
                others.append(abs(1 / off - 1))
                others_inside += held
                there.append(f"{n}: {100 * (1 / off - 1):+.0f} %")
            name = workload.model.rpartition("/")[2]
            lines.append(
                f"| {name}, batch {batch}: forecast, measured ms | {foreseen.step.total_ms:.4g}, {measured:.4g}"
                f" ({100 * (1 / ratio - 1):+.0f} %); then at batch {', '.join(there)} | |"
            )
            print(lines[-1], flush=True)
    lines += [
        f"| mean error of the {len(errors)} models | {100 * statistics.fmean(errors):.1f} % | 15 % |",
        f"| their 90 % interval holds | {inside} of {len(errors)} | 9 of 10 |",
        f"| after one measured batch size: mean error at {len(others)} others | {100 * statistics.fmean(others):.1f} % | 6 % |",
        f"| their 90 % interval holds | {others_inside} of {len(others)} | |",
    ]
    return lines


def _compare(foreseen: Forecast, measured_ms: float) -> tuple[float, bool]:
    """(measured / forecast, whether the interval holds it)."""
    assert foreseen.step is not None
    assert foreseen.step_time_interval_ms is not None
    interval = foreseen.step_time_interval_ms
    return measured_ms / foreseen.step.total_ms, interval.low <= measured_ms <= interval.high


def _models(folder: Path) -> list[tuple[str, int, tuple[int, ...], int | None]]:
    """(spec, batch, other batches, sequence length)"""
    (folder / "gpt2.json").write_text(json.dumps(_GPT2))
    (folder / "bert.json").write_text(json.dumps(_BERT))
    return [
        ("resnet18", 8, (2, 16), None),
        ("resnet50", 4, (2, 8), None),
        ("vgg11", 2, (1, 4), None),
        ("mobilenet_v2", 8, (4, 16), None),
        (f"{PHOTOS}:cnn", 32, (8, 96), None),
        (f"{PHOTOS}:transformer", 16, (4, 48), None),
        ("timm:vit_tiny_patch16_224", 4, (2, 12), None),
        ("timm:densenet121", 4, (2, 8), None),
        (f"transformers:{folder / 'gpt2.json'}", 2, (1, 4), 64),
        (f"transformers:{folder / 'bert.json'}", 8, (4, 16), 64),
    ]
