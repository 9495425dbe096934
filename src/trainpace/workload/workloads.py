"""Get the workload of a model: from a file, the package, the cache, or a new trace.

[stored] The number format that a transformers configuration says its weights are stored in. Needs no torch.

[trace_cache] Traces kept in the user's cache, so that a second question about a model needs no torch.

A trace follows from the model's spec (with the content of the file that it names), from what is asked of it, and from the
versions of this package's tracer and of the libraries that define the model. Functions in users' own files are not kept:
what they import cannot be known. TRAINPACE_TRACES names another folder, or "off".

[workloads] Get a Workload: from its file, from the package for a built-in model, from the cache, or by tracing a spec in a child process.

``zoo_workloads/NAME.VARIANT.json.gz`` holds a workload in all three number forms, where VARIANT is an optimizer, or a mode in
which none steps, so that a forecast of a built-in model needs no torch. ``python -m tools zoo-workloads`` traces them with the torch of
requirements.lock.
"""

import contextlib
import functools
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from trainpace.core import records
from trainpace.core.errors import TrainpaceError, UserCodeError
from trainpace.core.execution import FOR_OTHERS, Precision, optimizer_called
from trainpace.core.host import user_folder
from trainpace.core.intake import read_json
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated, started_isolated
from trainpace.workload.model_spec import ModelSpec
from trainpace.workload.recording import GRID, Family, Lengths
from trainpace.workload.workload import PLAIN, Form, Variant, Workload

# --- stored
STORAGE_KEYS = ("dtype", "torch_dtype")
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def stored_precision(spec: str | Workload) -> Precision | None:
    """The precision in which today's `from_pretrained` trains a model whose script says nothing of it: the file's, if of 16 bits.

    None for other models, and for a file that cannot be read, which the trace will refuse.
    """
    named = ModelSpec.of(spec)
    if named.kind != "transformers":
        return None
    try:
        values: Any = read_json(named.path)
    except TrainpaceError:
        return None
    parts = [values, values.get("text_config")] if isinstance(values, dict) else []
    stored = (part.get(key) for part in parts if isinstance(part, dict) for key in STORAGE_KEYS)
    return next(
        (_PRECISIONS[word] for word in stored if isinstance(word, str) and word in _PRECISIONS),
        None,
    )


# --- trace_cache
R = TypeVar("R", bound=Record)

CACHE_FOLDER, OFF = "TRAINPACE_TRACES", "off"
MOST_KEPT = 200
"""Traces in the folder; the oldest go first. One takes 5 to 100 KB."""
_SOURCES = ("workload/*.py", "core/execution.py")
"""What a trace follows from in this package."""


def cache_file(request: Mapping[str, Any]) -> Path | None:
    """Where the trace of a request to the worker is kept; None for what is not kept, and where the cache is off."""
    import hashlib  # late, with the versions: a built-in model is forecast without either
    from importlib.metadata import PackageNotFoundError, version

    spec = ModelSpec.of(request["spec"])
    chosen = os.environ.get(CACHE_FOLDER, "")
    if chosen == OFF or not (spec.kind == "built_in" or spec.is_library):
        return None
    try:
        content = Path(spec.path).read_bytes().hex() if spec.path else ""
        libraries = ["torch", spec.kind] if spec.is_library else ["torch"]
        made_by = [*map(version, libraries), _tracer()]
    except (OSError, PackageNotFoundError, ValueError):
        return None
    key = json.dumps([request, content, made_by], sort_keys=True, default=str)
    folder = Path(chosen) if chosen else user_folder("cache") / "traces"
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json.gz"


@functools.cache
def _tracer() -> str:
    import hashlib

    package = Path(__file__).parent.parent
    files = sorted(file for pattern in _SOURCES for file in package.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def from_cache(file: Path | None, kind: type[R]) -> R | None:
    """The record in a file of the cache; None where there is none, or none that can be read."""
    if file is None or not file.is_file():
        return None
    try:
        record = records.from_json(gzip.decompress(file.read_bytes()), kind, str(file))
    except (OSError, EOFError, TrainpaceError):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return record


def into_cache(file: Path | None, text: str) -> None:
    """Write a trace. A cache that cannot be written is none, which costs time alone."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_bytes(gzip.compress(text.encode(), 5))
        aside.replace(file)
        files = sorted(file.parent.glob("*.json.gz"), key=lambda one: one.stat().st_mtime)
        for old in files[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


# --- workloads
TRACE_TIMEOUT_S = 300.0
_WORKER = "trainpace.workload.trace_worker"
FOLDER = Path(__file__).parent / "zoo_workloads"
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
VARIANTS = {name: Variant(name) for name in OPTIMIZERS}
VARIANTS |= {
    "forward_backward": Variant(mode="forward_backward"),
    "inference": Variant(mode="inference"),
}


def load_workload(
    spec: str | Workload,
    forms: Sequence[Form],
    variant: Variant = PLAIN,
    timeout_s: float = TRACE_TIMEOUT_S,
) -> Workload:
    """The workload of a spec: read from ``WORKLOAD.json``, taken from the package for a built-in model, or else traced."""
    with workload_on_its_way(spec, forms, variant, timeout_s) as workload:
        return workload()


@contextlib.contextmanager
def workload_on_its_way(
    spec: str | Workload,
    forms: Sequence[Form],
    variant: Variant = PLAIN,
    timeout_s: float = TRACE_TIMEOUT_S,
) -> Iterator[Callable[[], Workload]]:
    """Start tracing a spec, in a process of its own; whatever the model's code does is one sentence at worst.

    Gives what waits for the workload, so that something can be done meanwhile.
    """
    if ModelSpec.of(spec).is_saved:
        saved = spec if isinstance(spec, Workload) else records.load(spec, Workload)
        yield lambda: _with_optimizer(saved, variant.optimizer, timeout_s)
        return
    assert isinstance(spec, str), "a workload is saved"
    packaged = packaged_workload(spec, forms, variant)
    if packaged is not None:
        yield lambda: packaged
        return
    request = {"spec": spec, "forms": list(forms), "variant": variant._asdict()}
    file = cache_file(request)
    found = from_cache(file, Workload) or _of_family(request)
    if found is not None:
        yield lambda: found
        return
    with started_isolated(_WORKER, request, timeout_s, f"tracing {spec}") as answer:

        def traced() -> Workload:
            text = answer()
            workload = records.from_json(text, Workload, f"the trace of {spec}")
            into_cache(file, text)
            return workload

        yield traced


def load_workloads(
    spec: str | Workload,
    forms: Sequence[Form],
    variant: Variant,
    lengths: Sequence[int],
    timeout_s: float = TRACE_TIMEOUT_S,
) -> dict[int, Workload]:
    """The workloads of a spec at several sequence lengths, of which as few are traced as tell all, in one process.

    Raises TrainpaceError for a spec whose length is its own: a saved workload, or a function in a file.
    """
    if len(lengths) == 1:
        return {
            lengths[0]: load_workload(
                spec, forms, variant._replace(sequence_length=lengths[0]), timeout_s
            )
        }
    named = ModelSpec.of(spec)
    if named.has_fixed_length:
        raise TrainpaceError(
            f"{named.in_words} has a sequence length of its own, and cannot be forecast at several.",
            "Name a configuration: transformers:CONFIG.json.",
        )
    plain = variant._replace(sequence_length=None)
    requests = {
        length: {
            "spec": spec,
            "forms": list(forms),
            "variant": plain._replace(sequence_length=length)._asdict(),
        }
        for length in lengths
    }
    found = {
        length: _of_family(request) or from_cache(cache_file(request), Workload)
        for length, request in requests.items()
    }
    missing = [length for length, workload in found.items() if workload is None]
    if missing:
        request = {"spec": spec, "forms": list(forms), "variant": plain._asdict()}
        text = run_isolated(
            _WORKER, {**request, "lengths": missing}, timeout_s * len(missing), f"tracing {spec}"
        )
        answer = records.from_json(text, Lengths, f"the traces of {spec}")
        for workload in answer.traced:
            assert workload.sequence_length is not None, "it was traced at a length"
            into_cache(cache_file(requests[workload.sequence_length]), records.to_json(workload))
        for family in answer.families:
            _keep_family(request, family)
        found |= {length: answer.at(length) for length in missing}
    return {length: workload for length, workload in found.items() if workload is not None}


def _family_file(request: Mapping[str, Any], rest: int) -> Path | None:
    variant = {**request["variant"], "sequence_length": None}
    return cache_file({**request, "variant": variant, "family": rest})


def _of_family(request: Mapping[str, Any]) -> Workload | None:
    """The workload of a request that traces at other lengths tell; None where none are kept that do."""
    length = request["variant"]["sequence_length"]
    family = None if length is None else from_cache(_family_file(request, length % GRID), Family)
    return family.at(length) if family is not None and family.holds(length) else None


def _keep_family(request: Mapping[str, Any], family: Family) -> None:
    """Keep a family, unless the one that is kept holds as many lengths or more."""
    file = _family_file(request, family.least % GRID)
    before = from_cache(file, Family)
    if before is None or family.size > before.size:
        into_cache(file, records.to_json(family))


def _with_optimizer(workload: Workload, optimizer: str | None, timeout_s: float) -> Workload:
    """The saved workload with an optimizer that was asked for, its own where none was."""
    if (
        optimizer is None
        or workload.mode != "train"
        or optimizer_called(optimizer) == workload.optimizer
        or not workload.trained
    ):
        return workload
    request = {"workload": records.to_json(workload), "optimizer": optimizer}
    answer = run_isolated(
        _WORKER, request, timeout_s, f"tracing the update of {workload.model} by {optimizer}"
    )
    return records.from_json(answer, Workload, f"the trace of {optimizer}'s update")


def trace_many(
    models: Mapping[str, tuple[str, Form, Variant]], timeout_s: float = TRACE_TIMEOUT_S
) -> dict[str, str]:
    """Trace several specs in one process, each into its file: {file: (spec, form, variant)}. Saves starting torch each time.

    Returns the reasons of those that could not be traced. Should the process die, the ones that it had not come to
    are traced one by one, so that one bad model costs itself alone.
    """
    requests = {
        file: {"spec": spec, "forms": [form], "variant": variant._asdict()}
        for file, (spec, form, variant) in models.items()
    }
    what = f"tracing {len(models)} models"
    try:
        return dict(
            json.loads(run_isolated(_WORKER, {"files": requests}, timeout_s * len(models), what))
        )
    except UserCodeError as error:
        if len(models) == 1:
            return dict.fromkeys(models, str(error))
    reasons: dict[str, str] = {}
    for file, one in models.items():
        if not Path(file).is_file():
            reasons |= trace_many({file: one}, timeout_s)
    return reasons


def packaged_workload(spec: str, forms: Sequence[Form], variant: Variant) -> Workload | None:
    """The packaged trace of a built-in model, None for everything else."""
    named = ModelSpec.of(spec)
    is_name = named.kind in ("built_in", "torchvision") and re.fullmatch(r"\w+", named.name)
    optimizer = optimizer_called(variant.optimizer or FOR_OTHERS)
    usual = Variant(mode=variant.mode, image_size=variant.image_size and 224)
    if not is_name or optimizer not in OPTIMIZERS or variant._replace(optimizer=None) != usual:
        return None
    file = packaged_file(named.name, optimizer if variant.mode == "train" else variant.mode)
    if not file.is_file():
        return None
    workload = records.from_json(gzip.decompress(file.read_bytes()), Workload, str(file))
    assumed = variant.optimizer is None and variant.mode == "train"
    return replace(
        workload,
        model=spec,
        assumes_optimizer=assumed,
        forms={form: workload.forms[form] for form in forms},
    )


def packaged_names() -> list[str]:
    """The built-in models whose traces are packaged; asking takes no torch."""
    return sorted({file.name.partition(".")[0] for file in FOLDER.iterdir()})


def packaged_file(name: str, variant: str) -> Path:
    return FOLDER / f"{name}.{variant}.json.gz"
