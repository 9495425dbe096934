"""Where the time of one forecast step goes, for the terminal: its parts, layers by what they do, operators, exchanges, memory."""

from __future__ import annotations

from trainpace.core.outcome import STEP_PARTS, Forecast
from trainpace.forecast import alike
from trainpace.report.phrases import ABOVE_ONE, WHY_ABOVE_ONE, duration, number, percent
from trainpace.report.screen import in_details, is_brief
from trainpace.report.step_charts import part_words
from trainpace.report.terminal import Column, print_lines, print_table, words

JOB_WORDS = {
    "stepping_s": "steps",
    "data_wait_s": "waiting for data",
    "stragglers_s": "waiting for the slowest node",
    "evaluation_s": "evaluation",
    "checkpoint_s": "checkpoints",
    "failures_s": "failures and restarts",
    "startup_s": "start-up",
    "compiling_s": "compiling",
    "preparing_s": "preparing data",
    "transfer_s": "copying data to the servers",
}
SHOWN_SHARE = 0.005
"""Share of a whole training from which a part of it is listed."""
SHOWN_ROLE = 0.01
"""Share of the device's time from which a role is named."""
MOST_KEPT_PARTS = 3


def _print_scaling(f: Forecast) -> None:
    if f.step is None or f.num_devices == 1:
        return
    total, e = f.step.total_ms, f.execution
    sizes = {
        "data": e.data_parallel_size,
        "tensor": e.tp,
        "pipeline": e.pp,
        "context": e.cp,
        "expert": e.ep,
    }
    shape = ", ".join(
        f"{name}-parallel size {n}" for name, n in sizes.items() if n > 1 or name == "data"
    )
    with in_details("the layout and its communication"):
        print_lines(f"Parallelism: {shape}; global batch {e.global_batch:,}.")
        if f.exposed_ms:
            kinds = sorted(f.exposed_ms.items(), key=lambda item: -item[1])
            shown = (
                f"{kind.replace('_', ' ')} {number(ms)} ms ({percent(ms / total)})"
                for kind, ms in kinds
            )
            print_lines(f"Exposed communication, not overlapped with compute: {', '.join(shown)}.")
        if f.step.idle_ms > 0:
            print_lines(
                f"Pipeline bubble: {number(f.step.idle_ms)} ms ({percent(f.step.idle_ms / total)})."
            )
    if f.scaling_efficiency is None:
        print_lines("Scaling efficiency: not known, because fewer devices cannot hold this model.")
    else:
        than = f"{f.scaling_reference_devices} devices, the fewest that fit"
        reference = "one device alone" if f.scaling_reference_devices == 1 else than
        print_lines(
            f"Scaling efficiency: {percent(f.scaling_efficiency)} per device, relative to"
            f" {reference}.",
            *[WHY_ABOVE_ONE] * (f.scaling_efficiency >= ABOVE_ONE),
        )


def print_breakdown(f: Forecast) -> None:
    assert f.step is not None
    total = f.step.total_ms
    rows = [
        (part_words(name), number(ms), percent(ms / total), ms / total)
        for name in STEP_PARTS
        if (ms := getattr(f.step, name)) > 0
    ]
    largest = sorted(range(len(rows)), key=lambda i: -float(rows[i][3]))[:MOST_KEPT_PARTS]
    parts = (words("part of the step"), Column("ms"), Column("share"), words("", 1, 8))
    print_table(parts, rows, spaced=False, keep=largest)
    with in_details("the parts of the training"):
        _print_training(f)
    heavy = [
        (
            alike(o.module, o.count) or "-",
            o.kind,
            o.phase,
            str(o.count),
            number(o.time_ms),
            percent(o.time_ms / total),
            o.bound,
        )
        for o in f.heaviest[:10]
    ]
    columns = (
        words("heaviest operators"),
        words("kind"),
        words("phase", 1),
        Column("count", 3),
        Column("ms"),
        Column("share", 2),
        words("bound by", 4, 7),
    )
    by_role = roles_in_words(f)
    if is_brief():
        print_lines(*[f"Most device time: {'; '.join(by_role[:MOST_KEPT_PARTS])}."] * bool(by_role))
    with in_details("all operators"):
        print_lines(*[f"Device time by what layers do: {'; '.join(by_role)}.", ""] * bool(by_role))
        if heavy:
            print_table(columns, heavy, spaced=False)
    _print_scaling(f)
    with in_details("the memory at its peak"):
        _print_memory(f)


def roles_in_words(f: Forecast) -> list[str]:
    """What layers of each role take of the device's time, the longest first, as far as it counts."""
    whole = sum(role.time_ms for role in f.roles)
    return [
        f"{role.role}{f', {role.layers} layers' if role.layers else ''}:"
        f" {percent(role.time_ms / whole)}"
        for role in f.roles
        if role.time_ms >= SHOWN_ROLE * whole
    ]


def _print_memory(f: Forecast) -> None:
    if f.memory is not None:
        m = f.memory
        with_context = m.device_gib > m.reserved_gib  # a CPU has no driver context
        full = f.fits and f.capacity_gib is not None and m.device_gib > f.capacity_gib
        # torch's allocator keeps what was freed as long as there is room
        shown = "all of the card" if full else f"{number(m.device_gib)} on the card"
        monitor = f"; {number(m.allocated_gib)} allocated, "
        monitor += (
            f"{number(m.reserved_gib)} reserved, {shown} (nvidia-smi)" if with_context else "in all"
        )
        print_lines(
            f"Memory at the peak: parameters {number(m.parameters_gib)}, gradients"
            f" {number(m.gradients_gib)}, optimizer states {number(m.optimizer_states_gib)},"
            f" activations {number(m.activations_gib)} GiB{monitor}."
        )


def _print_training(f: Forecast) -> None:
    """What the whole training consists of, where it is more than steps."""
    time = f.training_time
    if time is None or not 0 < time.total_s < float("inf"):
        return
    parts = {text: getattr(time, name) for name, text in JOB_WORDS.items()}
    shown = [
        (text, s, s / time.total_s) for text, s in parts.items() if s >= SHOWN_SHARE * time.total_s
    ]
    if len(shown) > 1:
        columns = (words("part of the training"), Column("time"), Column("share"), words("", 1, 8))
        print_table(
            columns,
            [(text, duration(s), percent(share), share) for text, s, share in shown],
            spaced=False,
        )
