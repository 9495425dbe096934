"""Relations between options hold for requests and for a project's defaults."""

import itertools
from types import FunctionType
from typing import get_args, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import trainpace
from trainpace.cli import forecasting, journal_commands, measuring
from trainpace.cli.command import in_options
from trainpace.core.errors import TrainpaceError
from trainpace.core.execution import EXECUTION_FIELDS
from trainpace.verbs import forecast
from trainpace.verbs.defaults import SETTABLE
from trainpace.verbs.forecast import ForecastRequest
from trainpace.verbs.plan import EXECUTION_NOW, PlanRequest
from trainpace.verbs.request import (
    Misuse,
    Silent,
    as_typed,
    check_relations,
    fields_of,
    inapplicable,
    rivals_of,
)
from trainpace.verbs.training import EXECUTED_AS, EXECUTION_OPTIONS


def every_command():
    """Return the fields of each command's request and view by the command's name."""
    found = {}
    for module in (forecasting, journal_commands, measuring):
        for name, function in vars(module).items():
            if not isinstance(function, FunctionType) or function.__module__ != module.__name__:
                continue
            hints = get_type_hints(function) if "request" in function.__annotations__ else {}
            if hints.get("view"):
                kinds = (hints["request"], hints["view"])
                found[name] = {n: f for kind in kinds for n, f in fields_of(kind).items()}
    return found


COMMANDS = every_command()
RELATED = {
    name: {
        n: f for n, f in fields.items() if f.about.needs or f.about.excludes or f.about.overrides
    }
    for name, fields in COMMANDS.items()
}


def alternatives(condition):
    return [one.partition("=")[0] for one in condition.split("|")]


def test_every_relation_names_an_option_of_the_same_command():
    assert {"forecast", "plan", "match", "schedule"} <= COMMANDS.keys()
    for name, fields in COMMANDS.items():
        for field in RELATED[name].values():
            for need in field.about.needs.split():
                assert set(alternatives(need)) & fields.keys(), (name, field.name, need)
    known = {name for fields in COMMANDS.values() for name in fields}
    for related in RELATED.values():
        for field in related.values():
            assert {*field.about.excludes.split(), *field.about.overrides.split()} <= known


def values_of(field):
    """Return values other than the default; their text does not matter for relations."""
    choices = [c for c in get_args(field.kind) if c != field.default] if field.choices else []
    return st.sampled_from(choices) if choices else st.just("given")


@st.composite
def questions(draw):
    fields = COMMANDS[draw(st.sampled_from(sorted(COMMANDS)))]

    def some(names):
        chosen = draw(st.sets(st.sampled_from(sorted(names)), max_size=12)) if names else ()
        return {name: draw(values_of(fields[name])) for name in sorted(chosen)}

    return fields, some(fields), some(fields.keys() & SETTABLE)


def check(fields, values):
    check_relations(fields, lambda name: values.get(name, fields[name].default))


@given(questions())
@settings(max_examples=400, deadline=None)
def test_project_defaults_never_break_a_valid_command(question):
    fields, typed, defaults = question
    defaults = {name: value for name, value in defaults.items() if name not in typed}
    for name in defaults:  # a self-contradicting file is a separate error
        assume(not set(fields[name].about.excludes.split()) & defaults.keys())
    try:
        check(fields, typed)
        valid = True
    except Misuse:
        valid = False
    assume(valid)
    dropped = inapplicable(fields, typed, defaults)
    check(fields, {**{n: v for n, v in defaults.items() if n not in dropped}, **typed})


@given(questions())
@settings(max_examples=200, deadline=None)
def test_dropped_default_conflicts_or_lacks_a_required_option(question):
    fields, typed, defaults = question
    dropped = inapplicable(fields, typed, defaults)
    for name in dropped:
        assert name in rivals_of(fields, typed) or fields[name].about.needs


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 10},
        {"epochs": 2},
        {"samples": 10, "tokens": 10, "epochs": 2},
        {"price": 2.0},
        {"tp": 2, "partition_activations": True},
        {"zero": 2, "keep_gathered": True},
        {"adapter": "lora", "fp32_weights": "all"},
    ],
)
def test_python_functions_check_option_relations(options):
    with pytest.raises(Misuse):
        trainpace.forecast("resnet18", gpu="T4", **options)


TYPED = (
    "1",
    "3",
    "64",
    "0.25",
    "2.5",
    "1000",
    "1h",
    "50000h",
    "1e9s",
    "1B",
    "fp32",
    "1,3,8",
    "1:4",
)
FORWARDED = sorted(
    {(name, f) for fields in COMMANDS.values() for name, f in fields.items() if f.about.unit},
    key=lambda pair: pair[0],
)


@pytest.mark.parametrize("name", sorted({name for name, _ in FORWARDED} - {"steps"}))
def test_a_value_of_one_command_can_be_typed_for_every_other_with_the_same_option(name):
    fields = [field for known, field in FORWARDED if known == name]
    for here, there, text in itertools.product(fields, fields, TYPED):
        try:
            read, wanted = here.read(text), there.read(text)
        except TrainpaceError:
            continue
        words = as_typed(there, read)
        assert words[0] == f"--{there.option}"
        got = [there.read_one(word) for word in words[1::2]]
        assert (tuple(got) if there.several else got[0]) == wanted


def test_execution_options_have_the_defaults_of_execution():
    fields = fields_of(ForecastRequest)
    own = {"accumulate", "precision", "checkpointing", "keep_gathered", "offload"}
    for name in EXECUTION_OPTIONS.keys() - own:
        assert fields[name].default == EXECUTION_FIELDS[EXECUTED_AS.get(name, name)].default


def test_options_of_the_current_setup_have_no_default():
    fields = fields_of(PlanRequest)
    assert {bool(fields[name].default) for name in EXECUTION_NOW} == {False}


def test_errors_of_records_name_options():
    names = [name for name in EXECUTION_FIELDS if name != "optimizer"]
    shown = in_options(" ".join(f"`{name}`" for name in names), COMMANDS["forecast"])
    assert "`" not in shown
    assert "--zero " in shown
    assert in_options("`price_usd_per_device_hour`", COMMANDS["plan"]) == "--price"
    checked = ("micro_batch", "accumulation", "step_time_s", "deadline_s", "evaluate_every_steps")
    assert "`" not in in_options(" ".join(f"`{name}`" for name in checked), COMMANDS["schedule"])
    assert in_options("`nnodes`", {}) == "`nnodes`"


def test_cpu_is_not_measured_for_a_precision_that_it_cannot_answer(monkeypatch):
    monkeypatch.setattr(forecast, "profile_or_brief", None)
    asked = ForecastRequest(model="resnet18", gpu=("cpu",), precision="bf16")
    with pytest.raises(Misuse, match="`precision` fp32"):
        forecast.run(asked, Silent())
