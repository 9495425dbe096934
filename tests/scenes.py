"""Answers of commands as sections, from handmade records: the same figures on every machine."""

import datetime
from functools import partial
from types import SimpleNamespace

from msgspec.structs import replace

from entries import entry
from ladder_world import World, forecast_of_ms, ladder, result, rung
from nouns import measurement, workload
from public_made import RUNS
from trainpace.core.execution import Execution
from trainpace.core.hardware import Cluster, find_device
from trainpace.core.outcome import FailedProbe, Interval, Jump, Memory
from trainpace.core.stats import trend_of
from trainpace.diagnose import IN_WORDS, Advice, Diagnosis, Proof, Share
from trainpace.forecast import Row, Score, ScoreLine, by, summarise
from trainpace.job import ONLY_STEPS, Question, Schedule, answer
from trainpace.journal import Lesson, Lessons, Odd, compare, scores
from trainpace.measure.sweep import analyse
from trainpace.offers import Offer, picks
from trainpace.offers.match import Job, nearest, rank
from trainpace.plan import Problem, plan_changes
from trainpace.report import (
    catalogue_sections,
    comparison_sections,
    damage_sections,
    device_sections,
    diagnosis_sections,
    entries_sections,
    entry_sections,
    equivalence_sections,
    forecast_sections,
    ladder_sections,
    match_sections,
    offers_sections,
    plan_next,
    plan_sections,
    public_run_sections,
    public_runs_sections,
    public_score_sections,
    recording_sections,
    schedule_sections,
    scores_sections,
    sweep_sections,
    table_of,
    validation_sections,
)
from trainpace.report.journal import lessons_sections
from trainpace.run import Question as VerifyQuestion
from trainpace.run.climbing import climb
from trainpace.run.equivalence import Equivalence, Facts, Tried, WayResult
from trainpace.run.trial import FailedTrial
from trainpace.verbs.forecast import ForecastRequest, Forecasts, Sweep
from trainpace.verbs.match import Matches, MatchRequest
from trainpace.verbs.measure import MeasuredSweep, SuiteRequest
from trainpace.verbs.plan import Planned
from trainpace.watch import PARTS, Line, Rank, Recording

TODAY = datetime.date(2026, 11, 21)
FORECAST = ForecastRequest(model="resnet50")


def foreseen(gpu, batch, ms, gib=None, fits=True, **more):
    made = forecast_of_ms(ms, micro_batch=batch, optimizer="sgd_momentum")
    gib = 0.05 * batch if gib is None else gib
    memory = Memory(
        parameters_gib=0.1,
        gradients_gib=0.1,
        optimizer_states_gib=0.1,
        activations_gib=gib,
        reserved_gib=gib + 0.5,
        device_gib=gib + 1,
    )
    return replace(
        made,
        model="resnet50",
        device=gpu,
        memory=memory,
        capacity_gib=16.0,
        fits=fits,
        mfu=0.31,
        largest_micro_batch=174,
        **more,
    )


def forecasts(rows, model=None, **more):
    """Handmade rows as an answer, of a workload without a forecaster."""
    forecaster = SimpleNamespace(workload=model or workload())
    sweep = Sweep(forecaster, rows, rows[0].execution)
    return Forecasts(rows=tuple(rows), jumps=more.pop("jumps", {}), sweeps=(sweep,), **more)


def step_ms(batch):
    return 5.0 + 2.0 * batch + (30.0 if batch > 16 else 0.0)


def forecast_of_cards():
    rows = [
        foreseen("T4", 64, 632.0),
        foreseen("RTX 3090", 64, 182.4),
        foreseen("A100 SXM 40GB", 64, 148.0),
    ]
    return forecast_sections(forecasts(rows), FORECAST)


def forecast_of_one_that_does_not_fit():
    rows = [foreseen("T4", 640, 6185.0, gib=51.3, fits=False)]
    return forecast_sections(forecasts(rows), FORECAST)


def forecast_of_batches():
    rows = [foreseen("T4", b, step_ms(b)) for b in range(1, 33)]
    cause = "Winograd pads the batch to 32 in 3 convolutions, most in the 3x3 convolution layer1"
    jump = Jump(
        before=16,
        batch=17,
        before_ms=37.0,
        after_ms=69.0,
        excess_ms=30.0,
        causes=(cause,),
        next_good=32,
    )
    steps = [step_ms(b) for b in range(1, 33)]
    trend = trend_of(range(1, 33), steps, [1e3 * b / ms for b, ms in enumerate(steps, 1)])
    answer = forecasts(rows, jumps={"T4": (jump,)}, trends={"T4": trend})
    return forecast_sections(answer, FORECAST)


def measured_sweep():
    def one(batch, ms):
        return replace(
            measurement(),
            model="resnet50",
            device="made-up CPU",
            execution=Execution(micro_batch=batch),
            median_ms=ms,
            step_times_ms=(ms,) * 9,
            peak_memory_gib=0.1 * batch,
            environment={"threads": "2"},
        )

    seen = [one(b, step_ms(b) * (1 + 0.01 * again)) for b in range(2, 33, 2) for again in (-1, 1)]
    failed = FailedProbe(
        model="resnet50",
        device="made-up CPU",
        execution=Execution(micro_batch=64),
        failure="out_of_memory",
        reason="it asked for 7.1 GiB, and 6 GiB are allowed.",
        environment={},
    )
    beside = {b: foreseen("made-up CPU", b, 1.1 * step_ms(b)) for b in range(2, 33, 2)}
    answer = MeasuredSweep(
        measurements=tuple(seen),
        failed=(failed,),
        analysis=analyse([*seen, failed]),
        forecasts=beside,
        sweep="0123456789abcdef",
    )
    return sweep_sections(answer, SuiteRequest(model="resnet50"))


def climbed_ladder():
    def ms_of(setup):
        if setup.execution.precision == "amp_bf16":
            return FailedTrial(kind="out of memory", reason="out of memory.")
        return (
            5.0
            if setup.loader.shards
            else 50.0
            if setup.loader.workers
            else 120.0
            if setup.execution.compile
            else 100.0
        )

    rungs = (
        rung("workers", workers=2),
        rung("bf16", precision="amp_bf16"),
        rung("compile", compile=True),
        rung("shards"),
    )
    job = {"job": Schedule(max_steps=36_000), "price_usd_per_hour": 2.0}
    return ladder_sections(
        table_of(
            climb(
                ladder(*rungs, **job),
                World(
                    lambda s: result(ms_of(s)) if isinstance(ms_of(s), float) else ms_of(s)
                ).actions(),
            )
        )
    )


def verified(equal):
    question = VerifyQuestion(model="train.py:task", batch=10, parts=4)
    tried = Tried(changes=("weight_by_samples",), difference=1e-7)
    apart = WayResult(
        way="accumulate",
        sizes=(3, 3, 2, 2),
        difference=2.4e-2,
        worst="layer4.1.conv2.weight",
        moved=0.3,
        equal=False,
        cause=("weight_by_samples",),
        tried=(tried,),
    )
    ddp = WayResult(
        way="ddp", sizes=(5, 5), difference=1.2e-7, worst="fc.bias", moved=0.3, equal=True
    )
    ways = (replace(apart, equal=True, difference=2e-7, cause=()) if equal else apart, ddp)
    return equivalence_sections(
        Equivalence(question=question, ways=ways, facts=Facts(losses=(2.3, 2.2)))
    )


def diagnosed():
    def share(cause, ms, proved=True):
        return Share(cause=cause, in_words=IN_WORDS[cause], ms=ms, share=ms / 20, proved=proved)

    advice = Advice(
        cause="data",
        title="3 loader workers instead of 0",
        how="DataLoader(num_workers=3): a sample takes 2.1 ms.",
        saves_ms=15.4,
        ceiling_ms=17.2,
        basis="measured",
    )
    proof = Proof(
        trial="cached_batch",
        plain_ms=20.0,
        without_ms=2.8,
        saved_ms=17.2,
        low_ms=16.9,
        high_ms=17.5,
        rounds=4,
    )
    found = Diagnosis(
        verdict="data",
        why=("86 % of a step (17.2 of 20 ms) goes into waiting for data.",),
        step_ms=20.0,
        step_ms_low=19.6,
        step_ms_high=20.4,
        shares=(
            share("data", 17.2),
            share("compute", 1.5),
            share("launch", 0.8),
            share("own_code", 0.5, False),
        ),
        proofs=(proof,),
        advice=(advice,),
        not_worth=(replace(advice, title="SGD(fused)", saves_ms=0.01),),
        steps_per_epoch=1000.0,
        epochs=90.0,
        job_steps=90_000.0,
        share_of_roof=None,
    )
    return diagnosis_sections(found, "recordings/train-20261121")


def watched():
    parts = {
        **dict.fromkeys(PARTS, 0.0),
        "data": 14.0,
        "forward": 2.0,
        "backward": 3.0,
        "other": 1.0,
    }
    one = Rank(
        rank=0,
        world_size=2,
        host="here",
        steps=997,
        step_ms=20.0,
        step_ms_low=19.6,
        step_ms_high=20.4,
        parts_ms=parts,
        micro_steps=1.0,
        samples_per_step=8.0,
        cpus=2,
        torch="2",
        threads=1,
        lines=(Line(part="other", line="train.py:12", called="", share=0.9),),
    )
    return recording_sections(
        Recording(
            command=("python", "train.py", "--name", "a b"),
            seconds=21.0,
            exit_code=0,
            ranks=(one, replace(one, rank=1)),
        ),
        "recordings/train-20261121",
    )


def scheduled(limit):
    priced = replace(ONLY_STEPS, price_usd_per_device_hour=2.5)
    asked = Question(
        schedule=Schedule(samples=1_281_167, epochs=90.0),
        conditions=priced,
        micro_batch=32,
        nproc_per_node=8,
        step_time_s=0.21,
        deadline_s=limit,
    )
    return schedule_sections(answer(asked))


def run_of(n, **fields):
    return entry(
        id=f"{n:032x}",
        created_at="2026-11-21T20:30:00.000000Z",
        step_time_ms=10.0 + n,
        batch=8 * n,
        forecast_ms=12.0 + n,
        forecast_low_ms=9.0,
        forecast_high_ms=13.5 + n,
        peak_memory_gib=1.5,
        interval_ms=Interval(low=9.5 + n, high=10.5 + n, coverage=0.9, basis="9 steps"),
        **fields,
    )


def listed():
    return entries_sections(
        [run_of(1), run_of(2), run_of(3, model="transformers:a-rather-long-name.json")],
        1_234,
        "journal.db",
    )


def compared():
    return comparison_sections(
        compare([run_of(1)], [replace(run_of(1), step_time_ms=20.0, device="A100 SXM 40GB")])
    )


def validated():
    def row(i, off):
        return Row(
            index=i,
            file="runs.csv",
            model="timm:resnet50",
            gpu="RTX 3090",
            num_gpus=1 + i % 2,
            precision="fp32",
            batch=8 * i,
            measured_ms=100.0,
            measured_memory_gib=None,
            forecast_ms=100.0 + off,
            low_ms=80.0,
            high_ms=120.0,
            error_pct=float(off),
            in_interval=abs(off) <= 20,
        )

    rows = [row(i, off) for i, off in enumerate((-30, -5, 4, 12), 1)]
    rows.append(
        Row(
            index=5,
            file="runs.csv",
            model="odd",
            gpu="T4",
            num_gpus=1,
            precision="fp32",
            batch=1,
            measured_ms=1.0,
            measured_memory_gib=None,
            unsupported="no such model.",
        )
    )
    return validation_sections(
        rows,
        summarise("all", rows),
        {"file": by(rows, lambda r: r.file), "gpu": by(rows, lambda r: r.gpu)},
    )


GOLDEN = {
    "forecast": forecast_of_cards,
    "forecast-no": forecast_of_one_that_does_not_fit,
    "forecast-batches": forecast_of_batches,
    "measure": measured_sweep,
    "ladder": climbed_ladder,
    "verify-yes": partial(verified, True),
    "verify-no": partial(verified, False),
    "diagnose": diagnosed,
    "watch": watched,
    "schedule": partial(scheduled, None),
    "schedule-no": partial(scheduled, 86_400.0),
    "journal-list": listed,
    "journal-compare": compared,
    "journal-show": lambda: entry_sections(run_of(1)),
    "journal-score": lambda: scores_sections(scores([run_of(i) for i in range(1, 30)])),
    "validate": validated,
}
"""Those whose figures no fit and no catalogue changes."""


def matched(deadline_s=None):
    own = [
        Offer(
            provider="p",
            instance_type=name,
            device=device,
            count=count,
            price_usd_per_hour=price,
            network_gb_per_s=50.0,
        )
        for name, device, count, price in (
            ("a-very-long-name-of-a-server", "T4", 1, 0.5),
            ("eight", "A100 SXM 40GB", 8, 16.0),
        )
    ]
    job = Job(schedule=Schedule(samples=100_000, epochs=90), global_batch=64, deadline_s=deadline_s)
    ranking = rank(workload(), own, {o.device: find_device(o.device) for o in own}, job, "usd")
    close = None if ranking.matches else nearest(ranking, job)
    answer = Matches(
        workload=workload(), job=job, ranking=ranking, nearest=close, picks=picks(ranking.matches)
    )
    return match_sections(
        answer, "cost", 12, TODAY, MatchRequest(model="resnet50", samples=100_000, epochs=90)
    )


def planned():
    cluster = Cluster(device=find_device("A100"), devices_per_node=2, price_usd_per_device_hour=2.0)
    s = Problem(workload(), cluster, Schedule(samples=100_000, epochs=3.0))
    start = Execution(micro_batch=8, nproc_per_node=2, optimizer="sgd_momentum")
    answer = Planned(plan=plan_changes(s, start), setting=s, script_changes=())
    command = ["trainpace", "plan", "resnet50", "--gpu", "A100"]
    return plan_sections(answer, following=[plan_next(command, None, None)])


def offered():
    return offers_sections(
        [
            Offer(
                provider="p",
                instance_type="gpu_8x",
                region="eu",
                device="H100 SXM",
                count=8,
                price_usd_per_hour=20.0,
            )
        ],
        TODAY,
    )


def scored_publicly():
    rows = [
        Row(
            index=0,
            file="",
            model="m",
            gpu="T4",
            num_gpus=1,
            precision="fp32",
            batch=8,
            measured_ms=100.0,
            forecast_ms=100.0 + e,
            low_ms=80.0,
            high_ms=120.0,
            error_pct=e,
            in_interval=abs(e) < 20,
        )
        for e in (3.0, -30.0, 12.0)
    ]
    fitted, new = summarise("fitted", rows[:1]), summarise("new", rows[1:])
    lines = tuple(
        ScoreLine(name=name, in_fit=fitted, not_in_fit=new)
        for name in ("T4", "a card with a rather long name")
    )
    return public_score_sections(
        Score(
            fingerprint="x",
            runs=3,
            without_forecast=7,
            overall=summarise("all", rows),
            in_fit=fitted,
            not_in_fit=new,
            by_card=lines,
            by_model_kind=lines,
            by_source=lines,
            by_way=lines,
            rows=(),
        )
    )


def taught():
    lessons = [
        Lesson(
            model=name,
            device="A100 SXM 80GB",
            new=3,
            batches=(1, 2, 4, 8, 16, 32, 64, 128),
            traced=name == "resnet50",
            forecast_off_pct=-12.3,
            corrects=True,
        )
        for name in ("resnet50", "own model 1 of a1b2c3")
    ]
    odd = Odd(
        model="resnet50",
        device="A100 SXM 80GB",
        batch=64,
        precision="amp_bf16",
        measured_ms=1000.0,
        forecast_ms=100.0,
        times=10.0,
    )
    return lessons_sections(Lessons(by=tuple(lessons), odd=(odd,), accepted_odd=False, unchecked=3))


OTHERS = {
    "public-list": lambda: public_runs_sections(RUNS, 100),
    "public-show": lambda: public_run_sections(RUNS[3]),
    "public-score": scored_publicly,
    "lessons": taught,
    "match": matched,
    "match-no": partial(matched, 1.0),
    "plan": planned,
    "offers": offered,
    "gpus": lambda: catalogue_sections([find_device(name) for name in ("T4", "A100 SXM 40GB")]),
    "gpu": lambda: device_sections(find_device("T4")),
    "damage": lambda: damage_sections(3, [], "shards"),
}
