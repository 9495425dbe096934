"""Combinations of valid options, and checks of every form of their answers.

`write_inputs` makes the models, recording, settings files and journal that the options name.
`question` draws a command line that meets the relations between its options. `ask` runs it in this
process, renders its answer in every form, and returns what is wrong with it.
"""

import contextlib
import html
import io
import itertools
import json
import math
import random
import re
import shlex
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
from msgspec.structs import replace
from rich.cells import cell_len

from cli.test_next_commands import parsed
from nouns import machine_profile, measurement, stacked, workload
from trainpace import report
from trainpace.cli import command, measuring
from trainpace.cli.program import main
from trainpace.core.errors import TrainpaceError
from trainpace.core.records import save
from trainpace.report.sections import Headline, Lines, Next, Notes, Section, Table, Verbatim
from trainpace.report.terminal import LINES
from trainpace.verbs.request import ResolvedField, check_relations
from trainpace.workload import Workload
from verbs.test_recorded import recorded
from verbs.test_relations import COMMANDS

WIDTHS = (60, 80, 120)
SCREEN = 80
"""Width of a screen on which every short answer fits."""
LONGER = 16
"""Lines beyond a screen that long commands and the notes of many options may take."""
RECORDING = "recordings/rec"
MODELS = {
    "resnet18": {"image_size": "224", "optimizer": "sgd_momentum"},
    "vector.json": {"optimizer": "sgd_momentum"},
    "blocks.json": {"optimizer": "adam", "sequence_length": "512"},
    "own.json": {"optimizer": "adam", "sequence_length": "512"},
    "one.json": {"optimizer": "sgd_momentum"},
    "large.json": {"optimizer": "adam", "sequence_length": "512"},
    "experts.json": {},
    f"{RECORDING}/workload.json": {"optimizer": "sgd_momentum"},
}
"""Models by name, with the values of options that a saved workload accepts."""
WORDS = {
    "_list": ("journal", "list"),
    "show": ("journal", "show"),
    "compare": ("journal", "compare"),
    "score": ("journal", "score"),
}
"""Words of a command whose function has another name."""
VERBS = ("forecast", "plan", "match", "schedule", *WORDS, "offers", "gpus", "watch", "diagnose")
VERBS += ("validate",)
OUTPUT = frozenset(
    "html share figure json details save_workload output svg trace timeout refresh write new yes"
    " adapter lora_rank lora_targets weights fp32_weights whole_modules baseline tolerance"
    " run_code traces models timeline steps".split()
)
"""Options for the form of an answer, for tracing, and for running a command. They are not drawn."""
EXPERTS = {"ep", "expert_tp", "expert_exchange", "expert_nodes", "expert_load"}
RUNNABLE = {"forecast", "match", "plan", "schedule", "journal", "gpus", "offers", "validate"}
"""Verbs whose "Next" commands are run. The others train, and are only parsed."""
CARDS = ("T4", "H100", "RTX 3090", "A100", "GTX 1080", "V100", "RTX 4090", "B200", "MI300X", "K80")
TYPED: dict[str, Sequence[str]] = {
    "gpu": CARDS,
    "name": CARDS,
    "num_gpus": ("1", "2", "4", "8"),
    "nodes": ("1", "2", "4"),
    "nnodes": ("1", "2"),
    "nproc_per_node": ("1", "4", "8"),
    "gpus_now": ("1", "2"),
    "nodes_now": ("1",),
    "tp": ("1", "2", "4"),
    "pp": ("1", "2"),
    "cp": ("1", "2"),
    "ep": ("2",),
    "expert_tp": ("2",),
    "expert_nodes": ("1",),
    "expert_load": ("1.2",),
    "virtual_stages": ("2",),
    "shard_size": ("2",),
    "zero": ("1", "2", "3"),
    "batch": ("1", "4", "16", "64", "4096"),
    "micro_batch": ("4", "32"),
    "accumulate": ("1", "2", "8"),
    "global_batch": ("16", "64", "256", "96"),
    "base_global_batch": ("32",),
    "network": ("12.5", "50"),
    "network_latency": ("5us", "10us"),
    "host_copy": ("3",),
    "host": ("EPYC 7742",),
    "samples": ("1000", "50k", "1281167"),
    "tokens": ("1M", "1B", "4096"),
    "epochs": ("1", "90", "0.5"),
    "max_steps": ("1", "1000", "100000"),
    "price": ("0.5", "2.50"),
    "startup": ("0s", "2min"),
    "evaluation_samples": ("500",),
    "checkpoint_every": ("10min", "2h", "100"),
    "mtbf": ("1000h", "50000h"),
    "step_variation": ("0.03",),
    "data_gb": ("150",),
    "download": ("0.5",),
    "sample_bytes": ("100k",),
    "storage": ("0.5", "10"),
    "software": ("torch2.8", "torch1.9", "tensorflow2.4", "keras", "jax"),
    "attention": ("flash2", "math", "efficient"),
    "loader_rate": ("100", "2000"),
    "workers": ("1", "4"),
    "mean_length": ("100",),
    "lengths": ("lengths.txt",),
    "transfer_from": ("measured.json",),
    "calibrated": ("profile.json",),
    "journal": ("own.db", "missing.db"),
    "hardware": ("devices.toml",),
    "machines": ("machines.toml",),
    "cluster": ("cluster.toml",),
    "config": ("ds.json", "args.json"),
    "watched": (RECORDING,),
    "loader": ("loader.json",),
    "sample_ms": ("0.5", "20"),
    "offline_share": ("0", "0.5"),
    "cores": ("4", "16"),
    "noise_scale": ("1000", "1e5"),
    "keep": ("precision", "compile", "micro-batch", "GPUs"),
    "deadline": ("1h", "3 days"),
    "budget": ("20", "$2k", "30s"),
    "provider": ("aws", "runpod"),
    "region": ("us-east", "eu"),
    "max_nodes": ("1", "2"),
    "preempted_every": ("6h",),
    "data_from": ("aws",),
    "top": ("3",),
    "step_time": ("210ms", "1s"),
    "throughput": ("500",),
    "epoch_time": ("2h",),
    "evaluate_every": ("100",),
    "evaluation_time": ("10s",),
    "checkpoint_time": ("5s",),
    "restart_time": ("60s",),
    "repeats": ("3",),
    "speedup": ("3.63x", "150%"),
    "learning_rate": ("0.1",),
    "id": ("public:9331e53526", "public:e8dbbd8898"),
    "a": ("public:3c1b85f7e6",),
    "b": ("public:4077d16d93", "mine"),
    "model": ("resnet50",),
    "device": ("T4", "RTX 3090"),
    "kind": ("import", "measure"),
    "outcome": ("ok",),
    "since": ("2020-01-01", "yesterday"),
    "text": ("resnet",),
    "source": ("profet",),
    "mode": ("train",),
    "sweep": ("abc",),
    "limit": ("1", "20"),
    "offset": ("0", "1"),
    "precision": ("fp32", "amp_fp16"),
    "optimizer": ("sgd",),
    "recorded": (RECORDING,),
    "steps": ("5:8",),
    "rounds": ("2",),
    "block": ("8",),
    "warm_up": ("3",),
    "runs": ("runs.csv",),
    "file": ("runs",),
    "command": ("torchrun --nproc-per-node 2 train.py",),
}
"""Values to draw for options without choices."""


def write_experts(folder: Path) -> None:
    """Write a model with experts. Tracing it takes some seconds."""
    from expert_models import language_task
    from trainpace.workload import trace_task

    save(trace_task(language_task(), ("fp32", "half")), folder / "experts.json")


def write_inputs(folder: Path) -> None:
    """Write every file that a question can name into a folder."""
    blocks = _named(stacked())
    save(workload(), folder / "vector.json")
    save(blocks, folder / "blocks.json")
    own = {"micro_batch": 16, "accumulation": 2, "precision": "bf16", "clip_gradients": True}
    save(replace(blocks, settings=own), folder / "own.json")
    save(replace(workload(), traced_batches=(48,)), folder / "one.json")
    save(_named(stacked(hidden=16 * 1024)), folder / "large.json")
    (folder / RECORDING).parent.mkdir()
    recorded(folder / RECORDING)
    save(measurement(), folder / "measured.json")
    save(machine_profile(), folder / "profile.json")
    (folder / "lengths.txt").write_text("".join(f"{n}\n" for n in (20, 70, 300, 512)))
    machine = (
        'device = "RTX 4090"\ncount = 4\nnodes = 2\nnetwork_gb_per_s = 1.25\nhost = "EPYC 7742"'
    )
    (folder / "machines.toml").write_text(f'[[machine]]\nname = "lab"\n{machine}\nprice = 1.20\n')
    (folder / "cluster.toml").write_text('gpu = "A100"\nnum_gpus = 4\nprice = 2.0\n')
    (folder / "devices.toml").write_text(
        '[[gpu]]\nname = "My card"\nfp32_tflops = 10\nmemory_bandwidth_gb_per_s = 500\nmemory_gib = 8\n'
    )
    keys = {"train_micro_batch_size_per_gpu": 32, "bf16": {"enabled": True}}
    (folder / "ds.json").write_text(json.dumps(keys | {"zero_optimization": {"stage": 2}}))
    (folder / "args.json").write_text(
        json.dumps({"num_train_epochs": 2, "per_device_train_batch_size": 32, "bf16": True})
    )
    cost = {"sample_wall_ms": 6.0, "sample_cpu_ms": 6.0, "collate_ms": 0.1, "batch_size": 32}
    (folder / "loader.json").write_text(
        json.dumps({"cost": cost, "cores": 8, "advice": {"offline_share": 0.5}})
    )
    head = "model_spec,gpu_canonical,precision,batch_per_gpu,step_time_ms\n"
    rows = [f"resnet50,T4,fp32,{n},{9 * n}\n" for n in (16, 32, 64)]
    (folder / "runs.csv").write_text(head + "".join(rows))
    with contextlib.chdir(folder), silent(), contextlib.suppress(SystemExit):
        main(["journal", "import", "runs.csv", "--journal", "own.db"])


def _named(model: Workload) -> Workload:
    """Return a model whose operators are in modules."""
    forms = {
        name: replace(form, operators=replace(form.operators, module=form.operators.kind))
        for name, form in model.forms.items()
    }
    return replace(model, forms=forms)


@contextlib.contextmanager
def silent() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


# ---- drawing

Choose = Callable[[Sequence[Any]], Any]
"""Chooses one of several values: `random.choice`, or a draw of Hypothesis."""
BASES: dict[str, Sequence[dict[str, str]]] = {
    "match": ({"samples": "50k", "epochs": "2"}, {"samples": "50k", "max_steps": "1000"}),
    "plan": (
        {"gpu": "A100", "samples": "50k", "epochs": "2"},
        {"gpu": "T4", "max_steps": "1000"},
        {"cluster": "cluster.toml", "samples": "50k", "epochs": "2"},
        {"gpu": "H100", "num_gpus": "4", "samples": "1M", "epochs": "1"},
    ),
    "forecast": (
        {"gpu": "T4"},
        {"gpu": "H100", "batch": "16"},
        {"gpu": "A100", "num_gpus": "4"},
        {"gpu": "A100", "num_gpus": "4", "nodes": "2", "network": "25"},
        {"gpu": "RTX 3090", "samples": "50k", "epochs": "2"},
        {},
    ),
    "schedule": (
        {"samples": "50k", "epochs": "2", "micro_batch": "32", "step_time": "100ms"},
        {"samples": "50k", "global_batch": "128", "step_time": "80ms", "deadline": "2h"},
        {"samples": "1M", "epochs": "9", "global_batch": "256", "deadline": "24h"},
    ),
    "watch": ({"recorded": RECORDING},),
}
"""Options that make a question complete, by verb. One set is drawn first."""


class Question(NamedTuple):
    """A command line, and the options in it by field."""

    verb: str
    words: tuple[str, ...]
    options: dict[str, str]

    @property
    def line(self) -> str:
        return shlex.join(["trainpace", *self.words])


def optional(verb: str) -> dict[str, ResolvedField]:
    """Return the fields of a verb that are drawn."""
    fields = COMMANDS[verb]
    skipped = OUTPUT | (frozenset() if verb in WORDS else {"model"})
    if verb in ("watch", "diagnose"):
        skipped |= {"command"}
    return {name: field for name, field in fields.items() if name not in skipped}


def values_of(verb: str, name: str, model: str) -> Sequence[str]:
    """Return values of an option as typed."""
    field = COMMANDS[verb][name]
    if name in ("sequence_length", "image_size", "optimizer") and verb not in WORDS:
        own = MODELS.get(model, {}).get(name)
        return (own,) if own else ()
    if name == "mode" and verb not in WORDS:  # Saved workloads are of whole steps.
        return ()
    if name in EXPERTS and model != "experts.json":
        return ()
    if field.is_flag:
        return ("",)
    if field.choices:
        return [choice for choice in field.choices if choice != str(field.default)]
    return [value for value in TYPED[name] if _reads(field, value)]


def _reads(field: ResolvedField, value: str) -> bool:
    try:
        field.read_one(value)
    except TrainpaceError:
        return False
    return True


def pairs_of(verb: str) -> list[tuple[str, str]]:
    return list(itertools.combinations(sorted(optional(verb)), 2))


def question(
    choose: Choose, verb: str, wanted: Sequence[str] = (), more: int = 3
) -> Question | None:
    """Draw a question with the wanted options, what they need, and up to `more` others.

    None if the wanted options exclude each other or have no value for the model.
    """
    fields, drawn = COMMANDS[verb], optional(verb)
    models = [model for model in MODELS if model.isidentifier() or Path(model).exists()]
    model = choose(models) if verb in ("forecast", "match", "plan") else ""
    options = dict(choose(BASES.get(verb, [{}])))
    others = [choose(list(drawn)) for _ in range(more)]

    def typed(name: str) -> str | None:
        values = values_of(verb, name, model)
        return choose(values) if values else None

    for name, must in [*((n, True) for n in wanted), *((n, False) for n in others)]:
        value = typed(name)
        if value is None:
            if must:
                return None
            continue
        tried = {**options, name: value} if must or name not in options else options
        settled = _settled(fields, drawn, tried, typed, {*wanted, name})
        if settled is not None:
            options = settled
        elif must:
            return None
    options = _consistent(options, fields, wanted)
    words = [*WORDS.get(verb, (verb,)), *([model] if model else [])]
    if verb == "diagnose":
        words = ["diagnose", RECORDING]
    positional = {n: v for n, v in options.items() if type(fields[n].about).__name__ == "Argument"}
    for name, field in fields.items():
        if field.required and name not in options and name != "model":
            positional[name] = choose(TYPED[name])
    words += [positional[name] for name in fields if name in positional]
    for name, value in options.items():
        if name not in positional:
            words += [f"--{fields[name].option}", *([value] if value else [])]
    return Question(verb, tuple(words), options)


def _settled(
    fields: dict[str, ResolvedField],
    drawn: dict[str, ResolvedField],
    options: dict[str, str],
    typed: Callable[[str], str | None],
    wanted: set[str],
) -> dict[str, str] | None:
    """Return the options without rivals of the wanted ones, and with what they need."""
    options = dict(options)
    for _ in range(12):
        given = {name: fields[name].read_one(v or True) for name, v in options.items()}

        def value_of(name: str, given: dict[str, Any] = given) -> Any:
            return given.get(name, fields[name].default)

        for name in list(options):
            for other in fields[name].about.excludes.split():
                if other in options:
                    loser = other if other not in wanted else name
                    if loser in wanted and {name, other} <= wanted:
                        return None
                    options.pop(loser, None)
            if name not in options:
                break
            for need in fields[name].about.needs.split():
                if not _add_needed(need, fields, drawn, options, typed, value_of):
                    if name in wanted:
                        return None
                    options.pop(name, None)
                    break
        with contextlib.suppress(TrainpaceError):
            given = {name: fields[name].read_one(v or True) for name, v in options.items()}
            check_relations(fields, lambda n, g=given: g.get(n, fields[n].default))
            return options
    return None


DIVIDING = ("tp", "pp", "cp", "ep", "expert_tp", "shard_size")
ONE_OF = (("epoch_time", "throughput", "step_time"), ("global_batch", "micro_batch"))
"""Options of `schedule` of which one determines the others."""
IN_CLUSTER = ("gpu", "num_gpus", "nodes", "network", "host", "price")


def _consistent(
    options: dict[str, str], fields: dict[str, ResolvedField], wanted: Sequence[str]
) -> dict[str, str]:
    """Return options whose numbers contradict each other less often."""
    options = dict(options)
    size = "num_gpus" if "num_gpus" in fields else "nproc_per_node"
    if any(options.get(name, "1") != "1" for name in DIVIDING) and size not in wanted:
        options[size] = "8"
    if options.get("nodes", "1") != "1":
        options.setdefault("network", "25")
    dropped = [
        name
        for names in ONE_OF
        if "micro_batch" in fields
        for name in names[1:]
        if names[0] in options
    ]
    dropped += IN_CLUSTER if "cluster" in options else ()
    return {n: v for n, v in options.items() if n not in dropped or n in wanted}


def _add_needed(
    need: str,
    fields: dict[str, ResolvedField],
    drawn: dict[str, ResolvedField],
    options: dict[str, str],
    typed: Callable[[str], str | None],
    value_of: Callable[[str], Any],
) -> bool:
    alternatives = [one.partition("=") for one in need.split("|")]
    known = [(n, wanted) for n, _, wanted in alternatives if n in fields]
    for name, wanted in known:
        value = value_of(name)
        if fields[name].is_given(value) and (not wanted or wanted == str(value)):
            return True
    for name, wanted in known:
        if name in drawn and (value := wanted or typed(name)) is not None:
            options[name] = value
            return True
    return not known


# ---- asking


class Asked(NamedTuple):
    """What became of a question: its exit code, its findings, and its "Next" commands."""

    code: int
    findings: tuple[str, ...]
    following: tuple[tuple[str, ...], ...] = ()
    data: Any = None
    refusal: str = ""


ODD = re.compile(
    r"(?<![\w./-])(?:None|nan|NaN|inf|Infinity|Ellipsis)(?![\w/-])|<[a-z.]+ object at|  +[,.;]| \.(?=\s)|\.\.(?!\.)(?<!\.\.\.)(?=\s)"
)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def ask(place: Path, words: Sequence[str], follow: bool = True, forms: bool = True) -> Asked:
    """Run a command in this process and check every form of its answer."""
    found: list[str] = []
    following: list[tuple[str, ...]] = []
    data: list[Any] = []

    def give(reply: command.Reply, view: Any) -> int:
        checked = _checked_reply(reply, view, forms)
        found.extend(checked.findings)
        following.extend(checked.following)
        data.append(checked.data)
        return reply.code

    with (
        contextlib.chdir(place),
        silent() as (_, err),
        warnings.catch_warnings(),
        mock.patch.object(command, "give", give),
        mock.patch.object(measuring, "give", give),
    ):
        warnings.simplefilter("error")
        try:
            main(list(words))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found.append(
                f"traceback: {type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"
            )
            code = -1
    said = err.getvalue()
    refusal = ""
    if code == 2:
        refusal = said.strip().splitlines()[-1] if said.strip() else ""
        if not refusal.startswith("trainpace: "):
            found.append(f"refused without a reason: {said!r}")
    if code not in (-1, 0, 1, 2):
        found.append(f"exit code {code}")
    found += _odd("stderr", said)
    if follow:
        found += _refused_next(place, following)
    return Asked(code, tuple(found), tuple(following), data[0] if data else None, refusal)


def _odd(where: str, text: str) -> Iterator[str]:
    for match in ODD.finditer(text):
        around = text[max(0, match.start() - 60) : match.end() + 40]
        yield f"{where}: {match[0]!r} in {around!r}"


def _checked_reply(reply: command.Reply, view: Any, forms: bool) -> Asked:
    sections = [*reply.sections]
    page = [*(reply.page or sections)]
    following = tuple(
        tuple(shlex.split(part.command) if isinstance(part.command, str) else part.command)
        for part in sections
        if isinstance(part, Next)
    )
    found = list(_empty(sections)) + list(_empty(page))
    data: Any = None
    try:
        data = json.loads(
            json.dumps(
                (reply.data or (lambda: command.to_jsonable(reply.record)))(), allow_nan=False
            )
        )
    except ValueError as error:
        found.append(f"JSON: {error}")
    if forms:
        found += _text_findings(sections)
        found += _page_findings(reply, view, page, data)
    return Asked(0, tuple(found), following, data)


def _empty(sections: Sequence[Section]) -> Iterator[str]:
    for part in sections:
        if isinstance(part, Headline) and not part.text.strip():
            yield "empty headline"
        if isinstance(part, Lines | Notes) and any(not line.strip() for line in part.lines):
            yield f"empty line in {part.lines!r}"
        if isinstance(part, Table) and part.rows:
            if any(len(row) != len(part.columns) for row in part.rows):
                yield f"table {part.title!r} with rows of another length"
            for i, column in enumerate(part.columns):
                if column.name and all(row[i] == "" for row in part.rows) and len(part.rows) > 1:
                    yield f"empty column {column.name!r} of table {part.title!r}"


def _text_findings(sections: Sequence[Section]) -> Iterator[str]:
    numbers = _numbers(_headlines(sections))
    for width, details in itertools.product(WIDTHS, (False, True)):
        where = f"text at width {width}{' with --details' * details}"
        with mock.patch.dict("os.environ", {"COLUMNS": str(width)}), silent() as (out, _):
            report.show(sections, details)
        text = out.getvalue()
        yield from _odd(where, text)
        missing = numbers - _numbers(text)
        if missing:
            yield f"{where}: without the headline's {sorted(missing)}"
        lines = text.splitlines()
        if width >= SCREEN and not details and len(lines) > LINES + LONGER:
            yield f"{where}: {len(lines)} lines"
        wide = max(lines, key=cell_len, default="")
        if cell_len(wide) > width and not _is_copied(wide, sections):
            yield f"{where}: a line of {cell_len(wide)}: {wide!r}"


def _headlines(sections: Sequence[Section]) -> str:
    return "\n".join(part.text for part in sections if isinstance(part, Headline))


def _numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def _is_copied(line: str, sections: Sequence[Section]) -> bool:
    """Return True if a line is text to copy, which is never wrapped."""
    return any(line in part.text for part in sections if isinstance(part, Verbatim))


def _page_findings(
    reply: command.Reply, view: Any, page: Sequence[Section], data: Any
) -> Iterator[str]:
    numbers = _numbers(_headlines(page)) if reply.code == 0 else set()
    if hasattr(view, "html"):
        stored = reply.page_data() if reply.page_data else data
        made = report.page(reply.title or "title", page, stored)
        yield from _html_findings("page", str(made), numbers, None if reply.page_data else data)
    if hasattr(view, "share"):
        shared = report.shared_page(reply.record, "Shared")
        yield from _html_findings("shared page", str(shared), numbers)


def _html_findings(where: str, made: str, numbers: set[str], data: Any = None) -> Iterator[str]:
    body, _, rest = made.partition('<script type="application/json" id="data">')
    stored = rest.partition("</script>")[0]
    try:
        if json.loads(stored, parse_constant=_no_constant) != data and data is not None:
            yield f"{where}: its JSON is not that of --json"
    except ValueError as error:
        yield f"{where}: its JSON: {error}"
    visible = html.unescape(
        re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", body, flags=re.DOTALL)
    )
    yield from _odd(where, re.sub(r"\s+", " ", visible))
    for heading in re.findall(r"<h2[^>]*>([^<]*)</h2>\s*(?:<h2|</section>\s*<h2|</main>)", body):
        yield f"{where}: empty section {heading!r}"
    missing = numbers - _numbers(visible)
    if missing:
        yield f"{where}: without the headline's {sorted(missing)}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} in JSON")


def _refused_next(place: Path, following: Sequence[Sequence[str]]) -> Iterator[str]:
    for program, *words in following:
        line = shlex.join(words)
        if program != "trainpace":
            yield f"Next is not of this program: {line}"
            continue
        if any(w in ("ID", "FOLDER", "FILE.py:FUNCTION", "MODEL") for w in words):
            continue
        try:
            with contextlib.chdir(place):
                context, _ = parsed(words)
                fields = getattr(context.command, "_fields", None)
                if fields:
                    check_relations(fields, context.params.__getitem__)
        except (click.ClickException, TrainpaceError) as error:
            yield f"Next is refused: {line}: {getattr(error, 'message', error)}"
            continue
        if words[0] in RUNNABLE and "--refresh" not in words:
            asked = ask(place, words, follow=False, forms=False)
            if asked.code == 2:
                yield f"Next is refused when run: {line}: {asked.refusal}"
            for finding in asked.findings:
                yield f"Next {line}: {finding}"


# ---- drawing many


class Search(NamedTuple):
    """Questions that were asked, by verb and exit code, and what was found."""

    asked: Counter[tuple[str, int]]
    findings: dict[str, list[str]]

    @property
    def in_words(self) -> str:
        kinds = sorted(self.findings.items(), key=lambda kind: -len(kind[1]))
        shown = [f"{len(found)} x {kind}\n    {found[0]}" for kind, found in kinds]
        return "\n".join([f"{self.asked.total():,} drawn: {dict(self.asked)}", *shown])


def search(place: Path, number: int, seed: int, most_s: float = math.inf) -> Search:
    """Ask questions until `number` were asked: first all pairs of options, then at random."""
    draw, started = random.Random(seed), time.monotonic()
    pairs = [(verb, pair) for verb in VERBS for pair in pairs_of(verb)]
    draw.shuffle(pairs)
    found = Search(Counter(), {})
    while found.asked.total() < number and time.monotonic() - started < most_s:
        verb, wanted = pairs.pop() if pairs else (draw.choice(VERBS), ())
        with contextlib.chdir(place):
            asked_for = question(draw.choice, verb, wanted, more=draw.randrange(6))
        if asked_for is None:
            continue
        answer = ask(place, asked_for.words)
        found.asked[verb, answer.code] += 1
        for finding in answer.findings:
            kind = re.sub(r"[\d.,]+|'[^']*'|\w+\.json|recordings\S+", "#", finding)[:80]
            found.findings.setdefault(kind, []).append(f"{asked_for.line}: {finding}")
    return found
