"""Load the workload of a model from a file, the package or the cache, or trace the model.

The package contains the workloads of built-in models in all three number formats, so their
forecasts do not need torch. They are in ``zoo_workloads/NAME.VARIANT.json.gz``. VARIANT is an
optimizer, or a mode without an optimizer. ``python -m tools zoo-workloads`` traces them with the
torch version of the lock file.

Traces of other models are stored in the user's cache. The cache key contains the model spec with
the content of its file, the request, and the versions of the tracer and of the libraries that
define the model. Functions in the user's own files are not cached, since their imports are unknown.
The environment variable TRAINPACE_TRACES sets another cache folder; "off" disables the cache.
"""

import contextlib
import functools
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from trainpace.core import records
from trainpace.core.errors import OutOfMemory, TrainpaceError, UserCodeError
from trainpace.core.execution import FOR_OTHERS, Precision, optimizer_called
from trainpace.core.host import user_folder
from trainpace.core.intake import read_json
from trainpace.core.records import Record
from trainpace.core.worker import run_isolated
from trainpace.workload.model_spec import ModelSpec
from trainpace.workload.workload import PLAIN, Form, Variant, Workload

R = TypeVar("R", bound=Record)

TRACE_TIMEOUT_S = 300.0
_WORKER = "trainpace.workload.trace_worker"
FOLDER = Path(__file__).parent / "zoo_workloads"
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adamw")
VARIANTS = {
    **{name: Variant(name) for name in OPTIMIZERS},
    "forward_backward": Variant(mode="forward_backward"),
    "inference": Variant(mode="inference"),
}
CACHE_FOLDER, OFF = "TRAINPACE_TRACES", "off"
MOST_KEPT = 200
"""Maximum number of cached traces. The oldest are deleted first. A trace has 5 to 100 KB."""
_SOURCES = ("workload/*.py", "core/execution.py")
"""Source files of this package whose content is part of the cache key."""
WEIGHTLESS = 'Build the model under `with torch.device("meta"):`, where weights need no memory.'
STORAGE_KEYS = ("dtype", "torch_dtype")
_PRECISIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def load_workload(
    spec: str | Workload,
    forms: Sequence[Form],
    variant: Variant = PLAIN,
    timeout_s: float = TRACE_TIMEOUT_S,
) -> Workload:
    """Return the workload of a model from a file, the package, the cache or a new trace.

    A new trace runs in a separate process.

    Args:
        spec: The model spec, or a workload.
        forms: Number formats that the workload must have.
        variant: How to trace.
        timeout_s: Time limit for a new trace in seconds.

    Raises:
        TrainpaceError: If the model cannot be traced.
    """
    if ModelSpec.of(spec).is_saved:
        saved = spec if isinstance(spec, Workload) else records.load(spec, Workload)
        return _with_optimizer(saved, variant.optimizer, timeout_s)
    assert isinstance(spec, str), "a workload is saved"
    packaged = packaged_workload(spec, forms, variant)
    return packaged or _traced(spec, [_request(spec, forms, variant)], timeout_s)[0]


def load_workloads(
    spec: str | Workload,
    forms: Sequence[Form],
    variant: Variant,
    lengths: Sequence[int],
    timeout_s: float = TRACE_TIMEOUT_S,
) -> dict[int, Workload]:
    """Return the workloads of a model at several sequence lengths.

    One process traces all lengths that are not cached.

    Raises:
        TrainpaceError: If the spec has a fixed length: a saved workload, or a function in a file.
    """
    named = ModelSpec.of(spec)
    if named.has_fixed_length:
        raise TrainpaceError(
            f"{named.in_words} has a fixed sequence length, and cannot be forecast at several.",
            "Use a configuration: transformers:CONFIG.json.",
        )
    lengths = [*dict.fromkeys(lengths)]
    requests = [_request(named.text, forms, variant._replace(sequence_length=n)) for n in lengths]
    return dict(zip(lengths, _traced(named.text, requests, timeout_s), strict=True))


def _traced(spec: str, requests: Sequence[dict[str, Any]], timeout_s: float) -> list[Workload]:
    """Return the workload of each request. One process traces all that are not cached."""
    found = [from_cache(cache_file(request), Workload) for request in requests]
    missing = [r for r, workload in zip(requests, found, strict=True) if workload is None]
    texts = []
    if missing:
        texts = json.loads(_answered(spec, missing, timeout_s * len(missing)))
    for request, text in zip(missing, texts, strict=True):
        found[requests.index(request)] = records.from_json(text, Workload, f"the trace of {spec}")
        into_cache(cache_file(request), text)
    return [workload for workload in found if workload is not None]


def _answered(spec: str, requests: Sequence[dict[str, Any]], timeout_s: float) -> str:
    """Return the worker's answer.

    If the memory does not hold the weights, the user's function runs again, on the meta device.
    """
    what = f"tracing {spec}"
    try:
        return run_isolated(_WORKER, {"requests": requests}, timeout_s, what)
    except OutOfMemory as error:
        if ModelSpec.of(spec).runs_code:
            again = [request | {"on_meta": True} for request in requests]
            with contextlib.suppress(TrainpaceError):
                return run_isolated(_WORKER, {"requests": again}, timeout_s, what)
        raise OutOfMemory(error.message, WEIGHTLESS) from None


def trace_many(
    models: Mapping[str, tuple[str, Form, Variant]], timeout_s: float = TRACE_TIMEOUT_S
) -> dict[str, str]:
    """Trace several specs in one process, which imports torch once, and write each to a file.

    Args:
        models: {file: (spec, form, variant)}.
        timeout_s: Time limit per model.

    Returns:
        {file: reason} for the models that could not be traced.
    """
    requests = {
        file: _request(spec, [form], variant) for file, (spec, form, variant) in models.items()
    }
    what = f"tracing {len(models)} models"
    try:
        answer = run_isolated(_WORKER, {"files": requests}, timeout_s * len(models), what)
    except UserCodeError as error:  # the process died, and with it the models after the last file
        return {file: str(error) for file in models if not Path(file).is_file()}
    return dict(json.loads(answer))


def _request(spec: str, forms: Sequence[Form], variant: Variant) -> dict[str, Any]:
    return {"spec": spec, "forms": list(forms), "variant": variant._asdict()}


def _with_optimizer(workload: Workload, optimizer: str | None, timeout_s: float) -> Workload:
    """Return the saved workload with the requested optimizer, or its own if none is requested."""
    has_it = optimizer is None or optimizer_called(optimizer) == workload.optimizer
    if has_it or workload.mode != "train" or not workload.trained:
        return workload
    request = {"workload": records.to_json(workload), "optimizer": optimizer}
    what = f"tracing the update of {workload.model} by {optimizer}"
    answer = run_isolated(_WORKER, request, timeout_s, what)
    return records.from_json(answer, Workload, f"the trace of {optimizer}'s update")


# --- packaged traces


def packaged_workload(spec: str, forms: Sequence[Form], variant: Variant) -> Workload | None:
    """Return the packaged trace of a built-in model, or None for everything else."""
    named = ModelSpec.of(spec)
    optimizer = optimizer_called(variant.optimizer or FOR_OTHERS)
    usual = Variant(mode=variant.mode, image_size=variant.image_size and 224)
    is_usual = variant._replace(optimizer=None) == usual and optimizer in OPTIMIZERS
    is_packaged = named.kind in ("built_in", "torchvision") and named.name in packaged_names()
    if not (is_packaged and is_usual):
        return None
    trains = variant.mode == "train"
    file = packaged_file(named.name, optimizer if trains else variant.mode)
    workload = records.from_json(gzip.decompress(file.read_bytes()), Workload, str(file))
    return replace(
        workload,
        model=spec,
        assumes_optimizer=trains and variant.optimizer is None,
        forms={form: workload.forms[form] for form in forms},
    )


def packaged_names() -> list[str]:
    """Return the built-in models. Needs no torch."""
    return sorted({file.name.partition(".")[0] for file in FOLDER.iterdir()})


def packaged_file(name: str, variant: str) -> Path:
    """Return the path of a packaged trace. `variant` is an optimizer or a mode without one."""
    return FOLDER / f"{name}.{variant}.json.gz"


# --- the user's cache


def cache_file(request: Mapping[str, Any]) -> Path | None:
    """Return the cache file of a request to the worker, or None if it is not cached."""
    import hashlib  # imported late, because forecasts of built-in models do not need it
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
    """Return the record in a cache file, or None if it is missing or unreadable."""
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
    """Write a trace to the cache. Write errors are ignored, because they only cost time."""
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


def stored_precision(spec: str | Workload) -> Precision | None:
    """Return the precision in which `from_pretrained` loads a model if the script sets none.

    It is the 16-bit dtype in a transformers configuration. None for other models, and for
    unreadable files, which tracing rejects later.
    """
    named = ModelSpec.of(spec)
    if named.kind != "transformers":
        return None
    try:
        values: Any = read_json(named.path)
    except TrainpaceError:
        return None
    parts = [values, values.get("text_config")] if isinstance(values, dict) else []
    stored = [part.get(key) for part in parts if isinstance(part, dict) for key in STORAGE_KEYS]
    known = (_PRECISIONS[word] for word in stored if isinstance(word, str) and word in _PRECISIONS)
    return next(known, None)
