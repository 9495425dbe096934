"""`python -m fitting public-journal`: package the measurements whose licence lets them be shared,
each with the forecast of this version.

    PYTHONPATH=.:.zoo:tests/shims python -m fitting.public_journal --data ../shared/data --traces
    out/traces

Writes `public_runs.json.gz`, `traces.json.xz` and `SOURCES.md` into src/trainpace/evidence. The
traces are kept in --traces, so that after a change of the constants the same command takes a minute
or two; the first time models are traced, for some twenty. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from fitting.prepare import CONFIGURATIONS, FILES, prepared
from fitting.runs import is_same_model, is_usable, usable
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import Execution
from trainpace.core.hardware import Device, find_device
from trainpace.core.outcome import MFU_LIMIT, Forecast
from trainpace.core.records import load, to_jsonable, write_whole
from trainpace.forecast import (
    FOLDER,
    RUNS_FILE,
    TRACES_FILE,
    CardFigures,
    Case,
    Conditions,
    MeasuredRun,
    PackagedTraces,
    PublicJournal,
    PublicRun,
    case_of,
    execution_of,
    fingerprint_of_constants,
    measured_ms,
    mode_of,
    model_kind,
    read_runs,
    read_table,
    signature_of,
    trace_file,
)
from trainpace.forecast.published import figures_of
from trainpace.forecast.validation import forecast_of, with_forecast
from trainpace.workload import Workload, trace_many

SOURCES = Path(__file__).parent / "data/public_sources.toml"
ATTRIBUTION = FOLDER / "SOURCES.md"
MODELS_PER_PROCESS = 12
LONGEST_NOTE = 160
USUAL = re.compile(
    r"timm:(resnet(18|50|101)|vit_(tiny|small|base|large)_patch16_224|deit_base_patch16_224|convnext_(tiny|base)"
    r"|swin_(tiny|base)_patch4_window7_224|efficientnet_b[04]|mobilenetv2_100|mobilenetv3_large_100|densenet121|regnety_032)"
)
"""Of timm's forward passes, thousands on two cards, those of usual models are packaged and one in
`ONE_OF` of the rest.
"""
ONE_OF = 10
ANOTHER_MODEL = "what bears its name today is another model than the measured one."


class Source(NamedTuple):
    """An entry of public_sources.toml."""

    file: str
    name: str = ""
    source: str = ""
    path: str = ""
    url: str = ""
    licence: str = ""
    copyright: str = ""
    date: str | None = None
    trust: str = ""
    why: str = ""
    packaged: bool = True

    def holds(self, file: str, source: str, place: str) -> bool:
        return self.file == file and self.source in ("", source) and self.path in place


class Chosen(NamedTuple):
    """A row that may be shared; its run's index counts all rows of FILES, as the fit does."""

    raw: Mapping[str, Any]
    run: MeasuredRun
    source: Source


def conditions_of(case: Case, trace: str) -> Conditions:
    """Return the conditions of a case. `trace` is the key of its workload in the package."""
    return Conditions(
        trace=trace,
        execution=case.execution,
        device=case.cluster.device.name,
        network_gb_per_s=case.cluster.network_gb_per_s_per_device,
        host=None if case.cluster.host is None else case.cluster.host.name,
        software=case.software,
        host_copy=case.run.host_copy == "yes",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--traces", type=Path, default=Path("out/traces"))
    options = parser.parse_args()
    left_out: Counter[str] = Counter()
    data = options.data.resolve()
    chosen = list(_chosen(data, options.traces / CONFIGURATIONS, left_out))
    cases = [_case(row.run, data) for row in chosen]
    _trace([case for case in cases if isinstance(case, Case)], options.traces)
    journal, traces = package(chosen, cases, options.traces, left_out)
    text = msgspec.json.encode(journal)
    RUNS_FILE.write_bytes(gzip.compress(text, 9, mtime=0))
    encoded = json.dumps(_traces_json(traces), separators=(",", ":")).encode()
    TRACES_FILE.write_bytes(lzma.compress(encoded, preset=9))
    write_whole(ATTRIBUTION, attribution(journal, left_out))
    _tell(journal, traces, left_out)


def read_sources() -> list[Source]:
    """What may be shared, and what is left out, in the order in which entries count."""
    entries = tomllib.loads(SOURCES.read_text())
    shared = [Source(**entry) for entry in entries["source"]]
    return shared + [Source(**entry, packaged=False) for entry in entries["left_out"]]


def _chosen(data: Path, configurations: Path, left_out: Counter[str]) -> list[Chosen]:
    sources, chosen, index = read_sources(), [], 0
    for name in FILES:
        _, rows = read_table(data / name)
        for run, raw in zip(read_runs(data / name), rows, strict=True):
            run, index = replace(run, index=index), index + 1
            place = raw["source_path_or_url"]
            source = next((s for s in sources if s.holds(run.file, raw["source"], place)), None)
            if source is None:
                raise SystemExit(
                    f"no entry of {SOURCES.name} covers {run.file}: {raw['source']}, {place}"
                )
            if not source.packaged:
                left_out[source.why] += 1
            elif run.file == "timm_inference" and not _is_packaged_pass(run.model_spec):
                left_out[
                    "timm's forward passes of less usual models: one model in ten is packaged"
                ] += 1
            else:
                chosen.append(Chosen(raw, prepared(run, data, configurations), source))
    return chosen


def _is_packaged_pass(spec: str) -> bool:
    return bool(USUAL.fullmatch(spec)) or zlib.crc32(spec.encode()) % ONE_OF == 0


def _case(run: MeasuredRun, data: Path) -> Case | str:
    try:
        case = case_of(run, data)
        return case if is_same_model(case) else ANOTHER_MODEL
    except TrainpaceError as error:
        return _without_paths(str(error), data)


def _without_paths(text: str, data: Path) -> str:
    return text.replace(str(data), "the data's folder")


def _trace(cases: Sequence[Case], traces: Path) -> None:
    missing = {
        str(file): case.trace_key
        for case in cases
        if not (file := trace_file(traces, case)).is_file()
    }
    if not missing:
        return
    traces.mkdir(parents=True, exist_ok=True)
    print(f"tracing {len(missing)} models, a second or two each; kept in {traces}", flush=True)
    names = sorted(missing)
    parts = [names[i : i + MODELS_PER_PROCESS] for i in range(0, len(names), MODELS_PER_PROCESS)]
    with ThreadPoolExecutor(2) as pool:
        for done, failed in enumerate(
            pool.map(lambda part: trace_many({name: missing[name] for name in part}), parts), 1
        ):
            for name, reason in failed.items():
                print(f"not traced: {missing[name][0]}: {reason}")
            print(f"{min(done * MODELS_PER_PROCESS, len(names))} of {len(names)}", flush=True)


def package(
    chosen: Sequence[Chosen], cases: Sequence[Case | str], traces: Path, left_out: Counter[str]
) -> tuple[PublicJournal, PackagedTraces]:
    """Everything that is written. Rows that cannot be true are counted in `left_out`."""
    loaded: dict[Path, Workload] = {}
    workloads: dict[str, Workload] = {}
    conditions: dict[str, Conditions] = {}
    signatures: dict[tuple[float, ...], int] = {}
    runs: list[tuple[tuple[Any, ...], PublicRun, int]] = []
    cards: dict[str, CardFigures] = {}
    seen: set[str] = set()
    for row, case in zip(chosen, cases, strict=True):
        device = _device(row.run)
        if device is None:
            left_out["the source names no single card"] += 1
            continue
        run = _public_run(row, case, device)
        if run is None:
            left_out["no step is timed"] += 1
            continue
        capacity = device.memory_gib.value if device.memory_gib else None
        if run.peak_memory_gib and capacity and run.peak_memory_gib > capacity:
            left_out[
                "more peak memory than the card has, so that the card or the figure is wrong"
            ] += 1
            continue
        if run.id in seen:
            left_out["the same figure under the same conditions twice"] += 1
            continue
        place = -1
        if isinstance(case, Case):
            file = trace_file(traces, case)
            if file.is_file():
                workload = (
                    loaded[file]
                    if file in loaded
                    else loaded.setdefault(file, _packable(load(file, Workload)))
                )
                key = file.stem[:12]
                stated = conditions_of(case, key)
                found = forecast_of(stated, workload)
                run = with_forecast(run, found)
                if isinstance(found, Forecast) and _is_too_fast(run, found):
                    left_out[
                        "faster than the card's peak, so that the card or the figure is wrong"
                    ] += 1
                    continue
                workloads[key], conditions[run.id] = workload, stated
                fitted = is_usable(case) and usable([(case, workload)]) != []
                # the two constants of torch.compile before 2.2 were set on Languini's steps
                # (fitting.runs.is_usable)
                fitted |= run.collection == "languini_throughput" and case.execution.compile
                # the deviation of steps with divided experts was set on all of them; BLOOM's heads
                # of 150 numbers set MISALIGNED
                fitted |= workload.has_experts or run.collection == "bigscience_bloom"
                run = replace(run, in_fit=fitted, model_kind=model_kind(workload))
                signature = signature_of(workload, case.execution.precision)
                place = signatures.setdefault(signature, len(signatures))
            else:
                run = replace(run, why_no_forecast="its model could not be traced.")
        seen.add(run.id)
        cards[device.name] = figures_of(device)
        order = (
            run.collection,
            run.model,
            run.device,
            run.gpus,
            run.precision,
            run.micro_batch,
            run.id,
        )
        runs.append((order, run, place))
    runs.sort(key=lambda entry: entry[0])
    journal = PublicJournal(
        fingerprint=fingerprint_of_constants(),
        runs=tuple(run for _, run, _ in runs),
        signatures=tuple(signatures),
        signature_of_run=tuple(place for _, _, place in runs),
        cards=dict(sorted(cards.items())),
    )
    kept = PackagedTraces(
        workloads=dict(sorted(workloads.items())), conditions=dict(sorted(conditions.items()))
    )
    return journal, kept


def _device(run: MeasuredRun) -> Device | None:
    try:
        return find_device(run.gpu_canonical or run.gpu)
    except TrainpaceError:
        return None


def _public_run(row: Chosen, case: Case | str, device: Device) -> PublicRun | None:
    run, source = row.run, row.source
    try:
        e: Execution | None = execution_of(run)
        ms = measured_ms(run, e) if e else None
    except TrainpaceError:
        e, ms = None, run.step_time_ms
    if not ms:
        return None
    gpus = e.world_size if e else int(run.num_gpus or 1)
    place = row.raw["source_path_or_url"]
    stated: dict[str, Any] = {
        "model": run.model or run.model_spec.partition(":")[2].removesuffix(".json"),
        "device": device.name,
        "gpus": gpus,
        "nodes": e.nnodes if e else int(run.num_nodes or 1),
        "mode": mode_of(run),
        "micro_batch": e.micro_batch if e else int(run.batch_per_gpu or 0),
        "accumulation": e.accumulation if e else 1,
        "global_batch": int(run.global_batch or (e.global_batch if e else 0)),
        "sequence_length": int(run.seq_len) if run.seq_len else None,
        "image_size": int(run.img_size) if run.img_size else None,
        "precision": run.precision,
        "compile": run.compile,
        "memory_format": run.memory_format,
        "optimizer": run.optimizer or None,
        "parallelism": run.parallelism or None,
        "software": run.framework_version or run.framework,
        "step_time_ms": float(f"{ms:.6g}"),
        "peak_memory_gib": None if run.peak_mem_gib is None else round(run.peak_mem_gib, 3),
    }
    notes = _short(str(row.raw.get("notes") or ""))
    of = json.dumps(
        [
            source.url,
            place,
            run.model_variant_or_config,
            run.framework,
            stated,
            row.raw.get("notes"),
        ],
        sort_keys=True,
    )
    return PublicRun(
        **stated,
        id=hashlib.sha256(of.encode()).hexdigest()[:10],
        model_kind=_kind_by_name(stated["model"]),
        source=source.name,
        url=_url(place, source.url),
        licence=source.licence,
        date=_date(row, source),
        trust=source.trust,
        notes=notes,
        forecast_ms=None,
        low_ms=None,
        high_ms=None,
        in_fit=False,
        why_no_forecast=case if isinstance(case, str) else "",
        collection=run.file,
        assumed=case.assumed if isinstance(case, Case) else "",
    )


def _url(place: str, home: str) -> str:
    """A link to the file, at its commit where the place names one."""
    found = re.match(
        r"github(?:\.com)?[:/]([\w.-]+/[\w.-]+?)(?:@| )([0-9a-f]{7,40})\^? (\S+)", place
    )
    if found:
        return f"https://github.com/{found[1]}/blob/{found[2]}/{found[3].rstrip(',')}"
    named = re.match(r"github\.com/([\w.-]+/[\w.-]+) (\S+?)@([0-9a-f]{7,40})", place)
    if named:
        return f"https://github.com/{named[1]}/blob/{named[3]}/{named[2]}"
    return place if place.startswith("https://") else home


def _date(row: Chosen, source: Source) -> str | None:
    day = re.search(r"\brow date (\d\d)-(\d\d)", str(row.raw.get("notes") or ""))
    if day and row.run.file == "bigscience_bloom":
        return f"2022-{day[1]}-{day[2]}"
    return source.date


def _short(notes: str) -> str:
    """The first clauses of a note, of LONGEST_NOTE characters at most."""
    text = ""
    for clause in notes.split("; "):
        longer = f"{text}; {clause}" if text else clause
        if len(longer) > LONGEST_NOTE:
            break
        text = longer
    return text or notes[:LONGEST_NOTE]


_TRANSFORMERS = r"bert|gpt|llama|qwen|mistral|opt\b|bloom|phi|falcon|vit_|deit|swin|mpt|pi05|granite|power|santacoder|transformer"
_CONVOLUTIONS = (
    r"resne|vgg|mobilenet|efficientnet|inception|regnet|densenet|lenet|alexnet|cnn|retinanet|jasper"
)
_EXPERTS = r"mixtral|moe|deepseek|a3b|a22b|gpt.oss|kimi"


def _kind_by_name(model: str) -> str:
    """Of a model that is not traced."""
    kinds = (
        ("experts", _EXPERTS),
        ("transformers", _TRANSFORMERS),
        ("convolutions", _CONVOLUTIONS),
    )
    return next((kind for kind, words in kinds if re.search(words, model.casefold())), "other")


def _is_too_fast(run: PublicRun, found: Forecast) -> bool:
    """Would the measured step take more of the card's peak than there is?"""
    if found.mfu is None or run.forecast_ms is None:
        return False
    return found.mfu * run.forecast_ms / run.step_time_ms > MFU_LIMIT


def _packable(workload: Workload) -> Workload:
    """Without what no time depends on."""
    forms = {
        name: replace(form, memory=replace(form.memory, moments=form.memory.moments[:0]))
        for name, form in workload.forms.items()
    }
    return replace(
        workload,
        forms=forms,
        model=Path(workload.model.partition(":")[2] or workload.model).stem,
        settings={},
    )


def _traces_json(traces: PackagedTraces) -> dict[str, Any]:
    fields = to_jsonable(traces)
    return {name: fields[name] for name in PackagedTraces.__struct_fields__}


def attribution(journal: PublicJournal, left_out: Mapping[str, int]) -> str:
    """SOURCES.md: who measured, under which licence, and what is left out."""
    entries = [source for source in read_sources() if source.packaged]
    counts, able = (
        Counter(run.source for run in journal.runs),
        Counter(run.source for run in journal.runs if run.forecast_ms),
    )
    fitted = Counter(run.source for run in journal.runs if run.in_fit)
    lines = [
        "# Sources of the packaged measurements",
        "",
        "Figures of these projects are packaged with trainpace under their own licences, which ask for this attribution. Each",
        "run links to the file that it was taken from. Written by `python -m fitting public-journal`.",
        "",
        "| source | licence | copyright | date | trust | runs | with a forecast | in the fit | why this trust |",
        "|---|---|---|---|---|--:|--:|--:|---|",
    ]
    for entry in sorted(entries, key=lambda entry: entry.name):
        if counts[entry.name]:
            cells = [
                f"[{entry.name}]({entry.url})",
                entry.licence,
                entry.copyright,
                entry.date or "",
                entry.trust,
            ]
            figures = [f"{count[entry.name]:,}" for count in (counts, able, fitted)]
            lines.append(f"| {' | '.join([*cells, *figures, entry.why])} |")
    lines += ["", "Left out:", "", "| rows | why |", "|--:|---|"]
    lines += [
        f"| {count:,} | {why} |"
        for why, count in sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    ]
    return "\n".join(lines) + "\n"


def _tell(journal: PublicJournal, traces: PackagedTraces, left_out: Mapping[str, int]) -> None:
    runs = journal.runs
    timed, fitted = (
        sum(run.forecast_ms is not None for run in runs),
        sum(run.in_fit for run in runs),
    )
    print(
        f"{len(runs):,} runs on {len(journal.cards)} cards, {timed:,} with a forecast, of which {fitted:,} were in the fit"
    )
    for file in (RUNS_FILE, TRACES_FILE):
        print(f"{file.stat().st_size / 1e3:,.0f} kB in {file}")
    print(f"{len(traces.workloads)} workloads; left out: {sum(left_out.values()):,} rows")


if __name__ == "__main__":
    main()
