"""`journal` and `serve`: manage stored runs, and configure the dashboard."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from trainpace.core.errors import TrainpaceError
from trainpace.core.records import Record, common_fields, write_whole
from trainpace.core.units import parse_count
from trainpace.forecast import PublicRun, as_precision
from trainpace.journal import (
    VERSION,
    Comparison,
    Entry,
    Given,
    Imported,
    Journal,
    Query,
    Scores,
    SharedRuns,
    Sweep,
    compared,
    export,
    import_file,
    is_public,
    matching,
    public_run,
    scores,
    share,
    text_of,
)
from trainpace.verbs import places
from trainpace.verbs.places import HardwareFile
from trainpace.verbs.request import (
    COUNT,
    NEW_FILE,
    Argument,
    Field,
    Misuse,
    Progress,
    Request,
    within,
)

if TYPE_CHECKING:
    from trainpace.forecast import Score


Format = Literal["auto", "trainpace", "shared", "runs", "timm", "hf", "mlflow"]
RunId = Annotated[str, Argument("A run's id, or the first digits of it.", metavar="ID")]
AnyRunId = Annotated[
    str, Argument("A run's id, or its first digits; public:ID for a public run.", metavar="ID")
]
Public = Annotated[
    bool,
    Field(
        "List the public journal instead: measurements by others that come with trainpace, each"
        " with its source."
    ),
]


class JournalRequest(Request):
    journal: places.JournalPlace = None

    def opened(self) -> Journal:
        """Open the journal. A journal that the user names must exist."""
        return Journal.open(self.journal, create=self.journal is None)


class FilteredRequest(JournalRequest, kw_only=True):
    """Request with filters for runs of the journal."""

    model: Annotated[str, Field("A part of the model's name.")] = ""
    device: Annotated[str, Field("A part of the device's name.")] = ""
    exact: Annotated[bool, Field("--model and --device are whole names.")] = False
    batch: Annotated[int | None, Field("Micro-batch size.", COUNT)] = None
    precision: Annotated[str, Field("fp32, tf32, amp_fp16, amp_bf16, ...")] = ""
    optimizer: Annotated[str, Field("sgd, sgd_momentum, adam, adamw, ...")] = ""
    kind: Annotated[str, Field("measure, watch, run or import.")] = ""
    outcome: Annotated[str, Field("ok, out_of_memory, timeout or crashed.")] = ""
    mode: Annotated[str, Field("train, forward_backward or inference.")] = ""
    source: Annotated[str, Field("A part of an imported run's source, such as a file name.")] = ""
    sweep: Annotated[
        str, Field("Runs of this sweep; the first digits of its id are enough.", metavar="ID")
    ] = ""
    since: Annotated[str, Field("Runs from this time on (UTC): 2026-11-21.", metavar="DATE")] = ""
    text: Annotated[str, Field("Text to find in names, notes, reasons, commands and sources.")] = ""

    def query(self, with_forecast: bool = False) -> Query:
        filters = common_fields(self, Query)
        return Query(micro_batch=self.batch, with_forecast=with_forecast, **filters)


THE_PUBLIC = "the public journal"


class ListRequest(FilteredRequest, kw_only=True):
    limit: Annotated[int, Field("Runs to show.", COUNT)] = 20
    offset: Annotated[int, Field("Number of newest runs to skip.", COUNT)] = 0
    sweeps: Annotated[bool, Field("List sweeps instead of runs.", excludes="public")] = False
    public: Public = False


class Listing(Record):
    """A page of own runs, public runs or sweeps.

    `total` is the number of matching runs in the journal at `place`, including those on other
    pages. It is 0 for sweeps.
    """

    runs: tuple[Entry, ...] = ()
    public: tuple[PublicRun, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    total: int = 0
    place: str = ""


def list_runs(request: ListRequest) -> Listing:
    """List own or public runs that match the filters, or all sweeps."""
    # Databases reject integers of more than 64 bits.
    limit, offset = (min(number, 2**31) for number in (request.limit, request.offset))
    if request.public:
        found = matching(request.query())
        return Listing(
            public=tuple(found[offset : offset + limit]), total=len(found), place=THE_PUBLIC
        )
    with request.opened() as journal:
        if request.sweeps:
            return Listing(
                sweeps=tuple(journal.sweeps()[::-1][offset : offset + limit]), place=journal.place
            )
        query = request.query()
        runs = journal.find(query, limit, offset)
        return Listing(runs=tuple(runs), total=journal.count(query), place=journal.place)


class ShowRequest(JournalRequest, kw_only=True):
    id: AnyRunId


def show(request: ShowRequest) -> Entry | PublicRun:
    if is_public(request.id):
        return public_run(request.id)
    with request.opened() as journal:
        return journal.get(request.id)


class CompareRequest(JournalRequest, kw_only=True):
    a: Annotated[str, Argument("A run or a sweep; public:ID for a public run.", metavar="A")]
    b: Annotated[
        str,
        Argument(
            "Another run or sweep. The word mine means your run that is most similar to A.",
            metavar="B",
        ),
    ]


def compare_runs(request: CompareRequest) -> Comparison:
    with request.opened() as journal:
        return compared(journal, request.a, request.b)


def has_counterpart(run: PublicRun, request: JournalRequest) -> bool:
    """Return True if the journal has an own run that can be compared with a public one."""
    sides = CompareRequest(a=f"public:{run.id}", b="mine", journal=request.journal)
    try:
        return bool(compare_runs(sides).ratios)
    except TrainpaceError:
        return False


class ImportRequest(JournalRequest, kw_only=True):
    files: Annotated[tuple[str, ...], Argument("Files with runs.", metavar="FILE...")]
    format: Annotated[Format, Field("Format of the files.")] = "auto"
    device: Annotated[str, Field("Device of the runs, if the files do not name it.")] = ""
    precision: Annotated[str, Field("Precision of the runs, if the files do not name it.")] = ""
    keep_identity: Annotated[bool, Field("Keep paths, user and host names.")] = False
    accept_odd: Annotated[
        bool,
        Field(
            "Also import shared runs whose step time differs from the forecast by a factor of 3 or"
            " more. By default they are skipped."
        ),
    ] = False


class Refused(Record):
    file: str
    reason: str


class Imports(Record):
    files: tuple[Imported, ...]
    refused: tuple[Refused, ...]


def import_runs(request: ImportRequest, progress: Progress) -> tuple[Imports, str]:
    """Import files. Returns the imported files and the place of the journal."""
    precision = as_precision(request.precision) if request.precision else None
    given = Given(request.device, precision, request.keep_identity, request.accept_odd)
    imported, refused = [], []
    with Journal.open(request.journal) as journal:  # Creates a missing journal for the new runs.
        for file in request.files:
            try:
                with progress.work("reading and checking"):
                    imported.append(import_file(journal, Path(file), request.format, given))
            except TrainpaceError as error:
                refused.append(Refused(file=file, reason=str(error)))
        return Imports(files=tuple(imported), refused=tuple(refused)), journal.place


class ExportRequest(FilteredRequest, kw_only=True):
    where: Annotated[
        str, Argument("A file, or the tracker's place.", metavar="FILE.{parquet,csv,json}|PLACE")
    ]
    to: Annotated[
        Literal["mlflow", "wandb"] | None,
        Field(
            "Export to an experiment tracker instead of a file. PLACE is MLflow's folder or"
            " address, or a project of Weights & Biases."
        ),
    ] = None


class Export(Record):
    file: str
    records: int


def export_runs(request: ExportRequest) -> Export:
    """Write runs to a file or an experiment tracker."""
    query, where = request.query(), request.where
    with request.opened() as journal:
        if request.to is not None:
            from trainpace.journal import export_mlflow, export_wandb

            count = (export_mlflow if request.to == "mlflow" else export_wandb)(
                where, journal.every(query)
            )
        elif Path(where).is_dir():
            raise Misuse(f"{where} is a folder: give a file, or a tracker with `to`.")
        else:
            sweeps = journal.sweeps() if query == Query() else ()
            count = export(Path(where), chain(sweeps, journal.every(query)))
    return Export(file=where, records=count)


class ShareRequest(FilteredRequest, kw_only=True):
    runs: Annotated[
        tuple[str, ...],
        Argument(
            "Ids of runs or sweeps. Without ids, all of your runs that match the filters.",
            metavar="[RUNS]...",
        ),
    ] = ()
    output: Annotated[
        str | None,
        Field(
            "File to write. Without it, the content is only shown.", NEW_FILE, metavar="FILE.json"
        ),
    ] = None


class Shared(Record):
    """Runs to share, and the number of withheld runs by reason."""

    shared: SharedRuns
    left_out: dict[str, int]

    @property
    def text(self) -> str:
        """Exact content of the shared file."""
        return text_of(self.shared)


def share_runs(request: ShareRequest) -> Shared:
    """Select runs to share. Raises TrainpaceError if there are none."""
    query = request.query()
    if request.runs and query != Query():
        raise Misuse("`runs` cannot be combined with filters.")
    with request.opened() as journal:
        if request.runs:
            named = chain.from_iterable(journal.run_or_sweep(id_) for id_ in request.runs)
            done = share({entry.id: entry for entry in named}.values())
        else:
            done = share(journal.every(query))
    if not done.runs.runs:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in done.left_out.items())
        raise TrainpaceError(
            f"there is no run to share{f'; left out: {reasons}' if reasons else ''}."
        )
    return Shared(shared=done.runs, left_out=done.left_out)


def write_shared(shared: Shared, path: str) -> None:
    write_whole(path, shared.text)


class MergeRequest(JournalRequest, kw_only=True):
    other: Annotated[str, Argument("Another journal, a path or URL.", metavar="OTHER")]


class Merge(Record):
    """Number of runs and sweeps that were merged from another journal."""

    source: str = msgspec.field(name="from")
    into: str
    new: int
    already_there: int


def merge(request: MergeRequest) -> Merge:
    """Merge the runs and sweeps of another journal."""
    with (
        Journal.open(request.journal) as journal,  # Creates a missing journal for the new runs.
        Journal.open(request.other, create=False) as source,
    ):
        if source.place == journal.place:
            raise TrainpaceError("a journal cannot be merged with itself.")
        sweeps, total = source.sweeps(), source.count()
        new = journal.add_many(chain(sweeps, source.every()))
        return Merge(
            source=source.place,
            into=journal.place,
            new=new,
            already_there=total + len(sweeps) - new,
        )


class AnnotateRequest(JournalRequest, kw_only=True):
    id: RunId
    text: Annotated[str, Argument("The notes, in place of what was there.", metavar="TEXT")]


def annotate(request: AnnotateRequest) -> Entry:
    with request.opened() as journal:
        return journal.annotate(request.id, request.text)


class DeleteRequest(JournalRequest, kw_only=True):
    ids: Annotated[
        tuple[str, ...], Argument("Runs, by their ids or the first digits.", metavar="ID...")
    ]


class Deletion(Record):
    deleted: tuple[str, ...]


def delete(request: DeleteRequest) -> Deletion:
    with request.opened() as journal:
        # Look up all ids first, so that a wrong id deletes nothing.
        ids = [journal.get(id_).id for id_ in request.ids]
        for id_ in dict.fromkeys(ids):
            journal.delete(id_)
    return Deletion(deleted=tuple(ids))


class JournalPlace(Record):
    journal: str
    database: str
    database_version: int
    runs: int


def path(request: JournalRequest) -> JournalPlace:
    with request.opened() as journal:
        return JournalPlace(
            journal=journal.place,
            database=journal.database,
            database_version=VERSION,
            runs=journal.count(),
        )


class ScoreRequest(FilteredRequest, kw_only=True):
    public: Annotated[
        bool,
        Field(
            "Forecast the runs of the public journal with this version, and score these forecasts"
            " instead. Takes about half a minute."
        ),
    ] = False


def score(request: ScoreRequest, progress: Progress) -> "Scores | Score":
    """Score the forecasts of own runs, or of public runs with this version."""
    if request.public:
        # Imported late, because it loads the forecasting code.
        from trainpace.forecast import score as score_public

        if request.query() != Query():
            raise Misuse("`public` cannot be combined with filters; it scores every public run.")
        with progress.work("forecasting the public runs", unit="runs") as work:
            # Report every 50 runs. The first runs take long because they load traces, and the
            # remaining time estimated from them would be hours too long.
            return score_public(
                lambda done, of: work.to(done, of) if done % 50 == 0 or done == of else None
            )
    with request.opened() as journal:
        return scores(journal.every(request.query(with_forecast=True)))


class ServeRequest(Request):
    host: Annotated[str, Field("The address to listen on; any but loopback needs a token.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        Field("Port to listen on; 0 means any free port.", within("port", 0, 65535, parse_count)),
    ] = 8765
    name: Annotated[
        tuple[str, ...], Field("Another name (DNS) that this server is called by; needs a token.")
    ] = ()
    with_token: Annotated[
        bool, Field("Ask for a token on loopback too, where other people use this machine.")
    ] = False
    journal: places.JournalPlace = None
    hardware: HardwareFile = None
