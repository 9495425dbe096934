"""`match` and `offers`: list servers with prices, and rank them by a training's cost or time."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from msgspec.structs import replace

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.execution import Execution, Precision
from trainpace.core.hardware import (
    Device,
    catalogue,
    catalogue_name,
    find_device,
    find_host,
    normalised,
)
from trainpace.core.host import usable_cores, user_folder
from trainpace.core.intake import read_text
from trainpace.core.outcome import forecast_row
from trainpace.core.records import (
    SCHEMA_VERSION,
    Record,
    Table,
    common_fields,
    to_jsonable,
    write_whole,
)
from trainpace.core.units import hours_from_s
from trainpace.job import JobConditions, Schedule
from trainpace.offers import (
    EGRESS_USD_PER_GB,
    OWN,
    Closest,
    Job,
    Match,
    Offer,
    Pick,
    Ranking,
    Rejected,
    cheapest_offer,
    is_stale,
    nearest,
    notes_on,
    parse_machines,
    picks,
    rank,
    read_offers,
    snapshot,
)
from trainpace.verbs.places import (
    HardwareFile,
    JournalPlace,
    consulted_journal,
    known_of,
    named_host,
    own_devices,
)
from trainpace.verbs.request import (
    ABOVE_0_S,
    AT_LEAST_1,
    DEVICES,
    DURATION,
    RATE,
    USD,
    Field,
    Progress,
    Request,
    Silent,
)
from trainpace.verbs.traced import (
    ChannelsLast,
    Evidence,
    HostWork,
    as_recorded,
    evidence_for,
    evidence_json,
    host_work,
    recorded_batch,
    recorded_notes,
    recording_of,
    workload_of,
)
from trainpace.verbs.training import (
    USUAL_GLOBAL_BATCH,
    MaxSteps,
    Tokens,
    TrainingRequest,
    assumed_setup,
    default_forms,
    default_precisions,
    epoch_of,
    software_of,
)
from trainpace.workload import Form, Workload

if TYPE_CHECKING:
    from trainpace.forecast import Forecaster, Nearness
    from trainpace.watch import Recording


Providers = Annotated[tuple[str, ...], Field("Only this provider; repeat for several.")]
Regions = Annotated[tuple[str, ...], Field("Only regions whose name contains this: us-east, eu.")]
Gpus = Annotated[tuple[str, ...], Field("Only this GPU; H100 alone is every H100.")]
MachinesFile = Annotated[
    str | None, Field("Your own machines, from this file.", metavar="FILE.toml")
]


class OffersRequest(Request):
    provider: Providers = ()
    region: Regions = ()
    gpu: Gpus = ()
    machines: MachinesFile = None
    hardware: HardwareFile = None
    refresh: Annotated[
        bool, Field("Fetch today's offers through gpuhunt and keep them for later.")
    ] = False


class Offers(Record, Table):
    """Servers on offer. The user's own machines come first."""

    offers: tuple[Offer, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        return to_jsonable(self.offers)


def list_offers(request: OffersRequest, progress: Progress) -> Offers:
    if request.refresh:
        from trainpace.offers import refreshed, write_offers

        fresh, unknown = refreshed(datetime.date.today())
        target = user_folder("data") / "offers.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, write_offers(fresh))
        left_out = (
            f"; left out, not in the hardware catalogue: {', '.join(sorted(unknown))}"
            if unknown
            else ""
        )
        progress.note(f"{len(fresh)} offers of today in {target}{left_out}.")
    every_offer = known_offers(request.machines, progress)
    offers, _ = chosen_offers(
        every_offer, request.provider, request.region, request.gpu, own_devices(request.hardware)
    )
    return Offers(offers=tuple(offers))


def known_offers(
    machines: str | None, progress: Progress, only_machines: bool = False
) -> tuple[Offer, ...]:
    """Return machines from the user's file, followed by offers.

    The offers are the refreshed ones if there are any, or else the packaged snapshot.
    """
    own: tuple[Offer, ...] = ()
    if machines is not None:
        own = parse_machines(read_text(machines), machines)
        for note in notes_on(own):
            progress.note(f"trainpace: {note}")
    if only_machines:
        return own
    refreshed = user_folder("data") / "offers.csv"
    public = (
        read_offers(read_text(refreshed), str(refreshed)) if refreshed.is_file() else snapshot()
    )
    return (*own, *public)


def check_provider(name: str, offers: Sequence[Offer]) -> None:
    """Raise UnknownName if a provider has neither offers nor a known egress price."""
    providers = sorted({*EGRESS_USD_PER_GB, *(offer.provider for offer in offers)})
    if name.casefold() not in providers:
        raise UnknownName("provider", name, (), f"`data_from` knows {', '.join(providers)}.")


def _is_one_of(card: str, family: str) -> bool:
    """Return True if the card belongs to a family such as A100, in any form factor."""
    word, *rest = card.split()
    form = rest[:1] and rest[0].upper().startswith(("PCIE", "SXM", "NVL"))
    return bool(form) and normalised(family) == normalised(word)


def chosen_offers(
    offers: Sequence[Offer],
    providers: Sequence[str],
    regions: Sequence[str],
    gpus: Sequence[str],
    own: Sequence[Device],
) -> tuple[list[Offer], dict[str, Device]]:
    """Filter offers by provider, region (a part of its name) and GPU.

    Returns:
        The matching offers, and their devices by name.

    Raises:
        UnknownName: No offer has such a provider, region or GPU.
        TrainpaceError: No offer passes all filters.
    """
    by_name = {device.name: device for device in (*catalogue(), *own)}
    rented = {offer.device for offer in offers}
    devices = {name: by_name.get(name) or find_device(name, own) for name in rented}
    cards = _cards_named(gpus, devices.values(), own)
    left = [offer for offer in offers if not gpus or devices[offer.device].name in cards]
    for field, names in (("provider", providers), ("region", regions)):
        _check_known(offers, field, names)
        left = [offer for offer in left if not names or _has(offer, field, names)]
    if left:
        return left, devices
    if not (providers or regions):
        raise TrainpaceError(
            f"No offer has {' or '.join(gpus)}.",
            "Describe your own machine with `machines` FILE.toml. For time alone: trainpace"
            " forecast.",
        )
    filters = {"provider": providers, "region": regions, "GPU": gpus}
    words = " and ".join(word for word, names in filters.items() if names)
    raise TrainpaceError(f"No offer has this {words}.", "See trainpace offers.")


def _cards_named(gpus: Sequence[str], devices: Iterable[Device], own: Sequence[Device]) -> set[str]:
    """Return the names of the cards that `gpus` name, alone or by their family."""
    names = {device.name for device in devices}
    families = {card for card in names for name in gpus if _is_one_of(card, name)}
    return families | {find_device(name, own).name for name in gpus}


def not_offered(
    gpus: Sequence[str], offers: Sequence[Offer], own: Sequence[Device] = ()
) -> list[Offer]:
    """Return this machine with one of each GPU that no offer has, without a price.

    Raises:
        UnknownName: There is no such GPU.
    """
    offered = {offer.device for offer in offers}
    cards = [
        find_device(name, own).name
        for name in gpus
        if not any(_is_one_of(card, name) for card in offered)
    ]
    return [
        Offer(
            provider=OWN,
            instance_type=card,
            device=card,
            count=1,
            price_usd_per_hour=0.0,
            vcpus=usable_cores(),
            source="not on offer",
        )
        for card in dict.fromkeys(cards)
        if card not in offered
    ]


def _check_known(offers: Sequence[Offer], field: str, names: Sequence[str]) -> None:
    for name in names:
        if not any(_has(offer, field, [name]) for offer in offers):
            known = sorted({getattr(offer, field) for offer in offers} - {""})
            raise UnknownName(field, name, known, "See trainpace offers.")


def _has(offer: Offer, field: str, names: Sequence[str]) -> bool:
    """Return True if the offer's provider is in `names`, or its region contains one of them."""
    value = getattr(offer, field).casefold()
    wanted = [name.casefold() for name in names]
    return any(name in value for name in wanted) if field == "region" else value in wanted


SOME_STEPS = 1000
"""Steps by which servers are compared if the length of the training is unknown."""
MIXED: tuple[Precision, ...] = ("amp_bf16", "amp_fp16")


class MatchRequest(TrainingRequest, kw_only=True):
    """Request to rank servers for a training, with its limits on time and money."""

    requires = "samples|tokens epochs|max_steps"
    groups = (
        "GPUs: gpu provider region machines max_nodes; "
        "Goal and limits: by deadline budget spot; "
        "Parallelism and memory: checkpointing"
    )

    samples: Annotated[int | None, Field("Samples per epoch: 1281167, 1.28M.", AT_LEAST_1)] = None
    tokens: Tokens = None
    max_steps: MaxSteps = None
    global_batch: Annotated[
        int | None,
        Field(
            "Samples per update, on every server.  [default: the task's loader's or trainer's, or"
            " 256]",
            AT_LEAST_1,
        ),
    ] = None
    precision: Annotated[
        tuple[Precision, ...],
        Field(
            "Allowed number formats; each card uses its fastest.  [default: one, as in forecast]"
        ),
    ] = ()
    by: Annotated[Literal["cost", "hours"], Field("What to rank by.")] = "cost"
    deadline: Annotated[float | None, Field("Time available: 24h, 3 days.", DURATION)] = None
    budget: Annotated[float | None, Field("Money available: 500, $2k.", USD)] = None
    provider: Providers = ()
    region: Regions = ()
    gpu: Gpus = ()
    max_nodes: Annotated[
        int, Field("Join up to this many servers of a kind.", DEVICES, sets="most_nodes")
    ] = 4
    spot: Annotated[bool, Field("Also spot prices, with the cost of preemption.")] = False
    preempted_every: Annotated[
        float | None,
        Field(
            "Mean time between preemptions of one spot server.  [default: 24h, assumed]", ABOVE_0_S
        ),
    ] = None
    data_from: Annotated[
        str,
        Field(
            "Provider that holds the data; leaving a cloud costs egress.",
            metavar="PROVIDER",
            needs="data_gb",
        ),
    ] = ""
    loader_rate: Annotated[
        float | None, Field("Samples per second that one CPU thread prepares.", RATE)
    ] = None
    machines: MachinesFile = None
    only_machines: Annotated[bool, Field("Rank only those.", needs="machines", overrides="gpu")] = (
        False
    )
    hardware: HardwareFile = None
    host: Annotated[
        str | None,
        Field(
            "The CPU of servers whose own is not published.  [default: one typical of their cards]",
            metavar="CPU",
        ),
    ] = None
    journal: JournalPlace = None
    no_journal: Annotated[bool, Field("Ignore measurements in the journal.")] = False
    channels_last: ChannelsLast = False
    compile: Annotated[bool, Field("Run under torch.compile.")] = False
    checkpointing: Annotated[
        bool, Field("Recompute the activations of repeated blocks, block by block.")
    ] = False
    evidence: Evidence = "nearest"

    @property
    def recomputes(self) -> bool:
        return self.checkpointing

    @property
    def forms(self) -> tuple[Form, ...]:
        forms = default_forms(self.model, self.precision)
        # The package has traces of built-in models in every form, so mixed precision can be shown
        # too.
        built_in = isinstance(self.model, str) and self.model.isidentifier()
        return (*forms, "amp") if built_in and not self.precision else forms

    def resolved(self, workload: Workload) -> Self:
        """Fill open options from the task's own settings, or else from defaults."""
        own: Mapping[str, Any] = workload.settings
        batch = (
            own["micro_batch"] * own.get("accumulation", 1)
            if "micro_batch" in own
            else USUAL_GLOBAL_BATCH
        )
        return replace(
            self,
            global_batch=self.global_batch or batch,
            precision=self.precision or default_precisions(workload),
            compile=self.compile or own.get("compile", False),
            checkpointing=self.checkpointing or own.get("activation_checkpointing") == "full",
        )


class Matches(Record):
    """All servers, ranked for a job.

    Attributes:
        nearest: If no server matches: the binding limit, the reason, and the server that comes
            closest.
        evidence: Public measurements near the first server.
        picks: The cheapest, the fastest, and the knee between them, among the matching servers.
        mixed: The cheapest server with mixed precision, if the job uses fp32 by default.
        recorded: Work of the host that the steps include, and caveats of a recording.
        usual_batch: True if the global batch was not given.
        assumed: Description of the default setup.
    """

    workload: Workload
    job: Job
    ranking: Ranking
    nearest: Closest | None
    journal_note: str = ""
    evidence: tuple[Nearness, ...] = ()
    picks: tuple[Pick, ...] = ()
    mixed: Match | None = None
    recorded: tuple[str, ...] = ()
    usual_batch: bool = False
    assumed: tuple[str, ...] = ()

    def as_json(self, today: datetime.date) -> dict[str, Any]:
        """Return what `trainpace match --json` prints. `today` decides which prices are old."""
        binds = None
        if self.nearest is not None:
            binding, reason, choice = self.nearest
            closest = (
                _match_json(choice, today)
                if isinstance(choice, Match)
                else _server_json(choice, today)
            )
            binds = {"binding": binding, "reason": reason, "nearest": closest}
        return {
            "record": "Matches",
            "schema_version": SCHEMA_VERSION,
            "model": self.workload.model,
            "global_batch": self.job.global_batch,
            "recorded": list(self.recorded),
            "deadline_s": self.job.deadline_s,
            "budget_usd": self.job.budget_usd,
            "picks": [
                {
                    "pick": pick.name,
                    "hour_less_usd": pick.hour_less_usd,
                    **_match_json(pick.match, today),
                }
                for pick in self.picks
            ],
            "rows": [
                _match_json(match, today, rank)
                for rank, match in enumerate(self.ranking.matches, 1)
            ],
            "missed": [_match_json(match, today) for match in self.ranking.missed],
            "rejected": [
                {
                    **_server_json(r, today),
                    "binding": r.binding,
                    "reason": r.reason,
                    "short_gib": r.short_gib,
                }
                for r in self.ranking.rejected
            ],
            "binds": binds,
            "evidence": evidence_json(self.evidence),
        }


def _server_json(choice: Match | Rejected, today: datetime.date) -> dict[str, Any]:
    offer, nodes = choice.offer, choice.nodes
    return {
        "provider": offer.provider,
        "instance_type": offer.instance_type,
        "region": offer.region,
        "gpu": offer.device,
        "gpus_per_node": offer.count,
        "nodes": nodes,
        "num_gpus": offer.count * nodes,
        "price_source": offer.source,
        "price_as_of": offer.as_of,
        "price_stale": is_stale(offer, today),
    }


FORECAST_COLUMNS = (
    "precision batch step_time_ms step_time_ms_low step_time_ms_high peak_memory_gib fits"
    " fit_probability provenance warnings notes"
).split()
"""Columns that a row of `match` has in common with one of `forecast`."""


def _match_json(m: Match, today: datetime.date, rank: int | None = None) -> dict[str, Any]:
    f, time, row = m.forecast, m.time, forecast_row(m.forecast)
    return {
        "rank": rank,
        **_server_json(m, today),
        "spot": m.spot,
        "pareto": m.on_front,
        "price_usd_per_hour": m.usd_per_hour,
        **{name: row[name] for name in FORECAST_COLUMNS},
        "accumulation": f.execution.accumulation,
        "zero_stage": f.execution.zero_stage,
        "shard_size": f.execution.shard_size,
        "steps": time.steps,
        "usd_per_step": _finite(m.mean_usd / time.steps),
        "hours": _finite(m.mean_hours),
        "hours_low": _finite(m.hours.low),
        "hours_high": _finite(m.hours.high),
        "usd": _finite(m.mean_usd),
        "usd_low": _finite(m.usd.low),
        "usd_high": _finite(m.usd.high),
        "egress_usd": m.egress_usd,
        "energy_kwh": None if time.kwh is None else _finite(time.kwh),
        "goodput": time.goodput,
        "checkpoints": time.checkpoints,
        "checkpoint_interval_s": time.checkpoint_interval_s,
        "time_s": {
            name: _finite(getattr(time, name))
            for name in time.__struct_fields__
            if name.endswith("_s")
        },
        "capacity_gib": f.capacity_gib,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run(request: MatchRequest, progress: Progress, recording: Recording | None = None) -> Matches:
    """Rank all servers on offer for a job, and add picks, evidence and caveats.

    `recording` is by default the one beside a saved workload.
    """
    offers, devices = _offers_for(request, progress)
    recording = recording or recording_of(request.model)
    workload = as_recorded(workload_of(request, progress), recording)
    if recording is not None and request.global_batch is None:
        request = replace(
            request, global_batch=recorded_batch(recording, workload.only_batch) or None
        )
    r = request.resolved(workload)
    work = host_work(recording, workload, r.loader_rate)
    on = None if work is None else work.on
    job = _job(r, workload)
    names = {offer.device for offer in offers}
    with consulted_journal(r.journal, r.no_journal, names, {workload.model}) as journal:
        knowledge = known_of(workload, journal)
        with progress.work("comparing servers"):
            ranked = partial(rank, workload, devices=devices, knowledge=knowledge, host_work=on)
            ranking = ranked(offers, job=job, by="usd" if r.by == "cost" else "hours")
            chosen = picks(ranking.matches)
            mixed: list[Match] = []
            if chosen and not r.precision and "amp" in workload.forms:
                in_mixed = replace(job, precisions=MIXED)
                mixed = ranked([chosen[0].match.offer], job=in_mixed, by="usd").matches
    corrected = ""
    if knowledge is not None and knowledge.devices:
        cards = _cards(knowledge.devices)
        corrected = f"Corrected by the journal: this workload measured on {cards}."
    first = ranking.matches[:1]
    return Matches(
        workload=workload,
        job=job,
        ranking=ranking,
        nearest=None if ranking.matches else nearest(ranking, job),
        journal_note=corrected,
        evidence=evidence_for(
            r.evidence, ((workload, m.forecast.execution, devices[m.offer.device]) for m in first)
        ),
        picks=chosen,
        mixed=mixed[0] if mixed else None,
        recorded=recorded_notes(
            recording, *([] if work is None else [work.in_words("each server's vCPUs")])
        ),
        usual_batch=request.global_batch is None and r.global_batch == USUAL_GLOBAL_BATCH,
        assumed=_assumed(request, r, ranking),
    )


def _assumed(asked: MatchRequest, r: MatchRequest, ranking: Ranking) -> tuple[str, ...]:
    """Describe the settings that the user did not choose. `r` is the resolved request."""
    recomputes = any(
        m.forecast.execution.activation_checkpointing != "none" for m in ranking.matches
    )
    return assumed_setup(
        not asked.precision and len(r.precision) > 1,
        batch=False,
        recompute=recomputes and not r.checkpointing,
    )


def _offers_for(r: MatchRequest, progress: Progress) -> tuple[list[Offer], dict[str, Device]]:
    every_offer = known_offers(r.machines, progress, r.only_machines)
    if r.data_from:
        check_provider(r.data_from, every_offer)
    own = own_devices(r.hardware)
    if not (r.provider or r.region or r.only_machines):
        unpriced = not_offered(r.gpu, every_offer, own)
        every_offer = (*unpriced, *every_offer)
        for note in notes_on(unpriced):
            progress.note(f"trainpace: {note}")
    offers, devices = chosen_offers(every_offer, r.provider, r.region, r.gpu, own)
    host = named_host(r.host)
    if host is not None:
        offers = [
            offer if offer.host else replace(offer, host=host.name, host_source="as given")
            for offer in offers
        ]
    return offers, devices


def _job(r: MatchRequest, workload: Workload) -> Job:
    length = r.sequence_length
    work = epoch_of(r.samples, r.tokens, length, workload, epochs=r.epochs, max_steps=r.max_steps)
    return Job(
        **common_fields(r, Job) | {"software": software_of(r)},
        schedule=work,
        precisions=r.precision,
        most_nodes=r.max_nodes,
        deadline_s=r.deadline,
        budget_usd=r.budget,
        clip_gradients=bool(workload.settings.get("clip_gradients", False)),
        conditions=r.conditions(
            preemption_mean_h=None if r.preempted_every is None else hours_from_s(r.preempted_every)
        ),
    )


class Placed(NamedTuple):
    """A training on the server that it is assumed to rent.

    Attributes:
        forecaster: Forecaster with the server's host CPU.
        cores: Cores per rank. None if unknown.
        points: Single-thread rating of the host CPU.
        words: The cores, and where they come from.
    """

    forecaster: Forecaster
    cores: float | None
    points: float
    words: str


def placed(
    work: HostWork,
    forecaster: Forecaster,
    execution: Execution,
    schedule: Schedule | None,
    conditions: JobConditions,
    cores: int | None,
) -> Placed:
    """Return a training on its assumed server.

    Without `cores`, it is the server with the cluster's GPUs on which the training costs least, as
    `match` ranks them. Its host CPU applies if the cluster has none.
    """
    from trainpace.forecast import host_of

    cluster = forecaster.target.cluster
    words = f"{cores} cores per node"
    if cores is None:
        words = "an unknown number of cores (--cores)"
        offer = _cheapest_server(work, forecaster, execution, schedule, conditions)
        if offer is not None and cluster.host is None and offer.host:
            forecaster = forecaster.on(replace(cluster, host=find_host(offer.host)))
        if offer is not None and offer.vcpus:
            cores = offer.vcpus
            server = f"{offer.provider} {offer.instance_type}".strip() + ", the cheapest server"
            server = "as this machine has" if offer.provider == OWN else server
            words = f"{cores} cores per node ({server}; --cores)"
    per_rank = None if cores is None else cores / cluster.devices_per_node
    return Placed(forecaster, per_rank, host_of(forecaster.target.cluster).points, words)


def _cheapest_server(
    work: HostWork,
    forecaster: Forecaster,
    execution: Execution,
    schedule: Schedule | None,
    conditions: JobConditions,
) -> Offer | None:
    """Return the server on which a training costs least. None if no server has these GPUs."""
    e, cluster = execution, forecaster.target.cluster
    device, count, nodes = cluster.device, cluster.devices_per_node, cluster.nodes
    offers = known_offers(None, Silent())
    offers = (*not_offered((device.name,), offers, (device,)), *offers)
    offers = tuple(o for o in offers if (o.device, o.count) == (device.name, count))
    job = Job(
        schedule=schedule or Schedule(max_steps=SOME_STEPS),
        global_batch=e.global_batch,
        precisions=(e.precision,),
        most_nodes=nodes,
        channels_last=e.channels_last,
        compile=e.compile,
        checkpointing=e.activation_checkpointing == "full",
        clip_gradients=e.clip_gradients,
        software=forecaster.target.software,
        conditions=conditions,
    )
    with contextlib.suppress(TrainpaceError):  # No server may be able to divide the batch.
        devices, known = {device.name: device}, forecaster.knowledge
        ranking = rank(forecaster.workload, offers, devices, job, "usd", known, work.on)
        if able := [match.offer for match in ranking.matches if match.nodes == nodes]:
            return able[0]
    return cheapest_offer(offers, device.name, count, nodes)


def _cards(names: Sequence[str]) -> str:
    """List each card once under its catalogue name. Drivers use other names."""
    return ", ".join(dict.fromkeys(catalogue_name(name) or name for name in names))
