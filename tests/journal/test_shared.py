"""Sharing uses an allow-list, so no planted name, path, host or secret leaves."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

import entries as strategies
from entries import entry, whole_entry
from trainpace.core.execution import EXECUTION_FIELDS, Execution
from trainpace.core.outcome import Interval, StepTime
from trainpace.journal import Entry, export, share, text_of
from trainpace.journal.database import VERSION
from trainpace.journal.sharing import MODEL, OPTIMIZER_NAMES, public_name, schema

ROOT = Path(__file__).parents[2]
SECRETS = (
    "jdoe",
    "jane.doe@acme.example",
    "node17.acme.example",
    "/home/jdoe/acme/train.py",
    "C:\\Users\\Jane Doe\\x.py",
    "hf_tokenvalue",
    "acme_secret_model",
    "10.1.2.3",
    "--api-key=hf_tokenvalue",
)
PLANTED = " ".join(SECRETS)
INTERVAL = Interval(low=9.0, high=11.0, coverage=0.9, basis="x")


def planted():
    """A run with planted secrets in every text field."""
    return whole_entry(
        model=PLANTED,
        device="Tesla T4",
        reason="",
        command=PLANTED,
        notes=PLANTED,
        source=PLANTED,
        loss=PLANTED,
        commit=PLANTED,
        forecast_basis=PLANTED,
        workload_key=PLANTED,
        sweep="ab" * 16,
        seed=42,
        execution=Execution(micro_batch=8, optimizer=PLANTED),
        interval_ms=Interval(low=9.0, high=11.0, coverage=0.9, basis=PLANTED),
        environment={
            **dict.fromkeys(("cpu", "gpu", "system", "host", "threads", PLANTED), PLANTED),
            **dict.fromkeys(("torch", "cuda", "cudnn", "python"), PLANTED),
            "rocm": f"6.1+{SECRETS[0]}",
        },
    )


def test_shared_runs_contain_no_planted_secret():
    done = share([planted()])
    text = text_of(done.runs)
    for secret in SECRETS:
        assert secret not in text
        for part in re.findall(r"[A-Za-z]{4,}", secret):
            assert part.lower() not in text.lower() or part in ("train", "model")
    (run,) = done.runs.runs
    assert (run.model, run.device, run.execution.optimizer) == ("own model 1", "T4", "other")
    assert run.software == {"rocm": "6.1"}
    assert run.host_cpu is None


def test_entry_fields_are_not_shared_by_default():
    """A field added to Entry is not shared until it is allowed."""
    one = planted()
    kept = json.loads(text_of(share([one]).runs))["runs"][0]
    assert set(kept) <= {
        "model",
        "device",
        "date",
        "outcome",
        "mode",
        "sequence_length",
        "image_size",
        "execution",
        "step_time_ms",
        "low_ms",
        "high_ms",
        "steps_timed",
        "parts",
        "peak_memory_gib",
        "reserved_memory_gib",
        "forecast_ms",
        "forecast_shares",
        "software",
        "host_cpu",
    }
    assert one.id not in text_of(share([one]).runs)
    assert one.created_at not in text_of(share([one]).runs)
    assert kept["date"] == one.created_at[:10]
    text_fields = [name for name in Entry.__struct_fields__ if PLANTED in str(getattr(one, name))]
    assert {"model", "command", "notes", "source", "loss", "commit", "workload_key"} <= set(
        text_fields
    )


@settings(max_examples=150, deadline=None)
@given(strategies.entries())
def test_shared_text_is_limited_to_known_values(one):
    one = replace(one, device="A100 SXM 80GB", kind="measure", mode="train")
    for run in json.loads(text_of(share([one]).runs))["runs"]:
        choices = {c for field in EXECUTION_FIELDS.values() for c in field.choices}
        for name, value in run.pop("execution").items():
            assert (
                not isinstance(value, str)
                or value in choices
                or (name == "optimizer" and value in OPTIMIZER_NAMES)
            )
        assert all(re.fullmatch(VERSION, version) for version in run.pop("software", {}).values())
        assert re.fullmatch(MODEL, run.pop("model"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.pop("date"))
        assert run.pop("device") == "A100 SXM 80GB"
        assert run.pop("outcome", "ok") in ("ok", "out_of_memory")
        left = [run.pop("parts", {}), *run.values()]
        assert not [value for value in left if isinstance(value, str)]


def test_only_public_model_names_are_shared():
    assert public_name("resnet50") == "resnet50"
    assert public_name("torchvision:vit_b_16") == "torchvision:vit_b_16"
    assert public_name("timm:convnext_base") == "timm:convnext_base"
    for own in (
        "train.py:make",
        "timm:acme_secret",
        "transformers:config.json",
        "AcmeNet",
        "random:cnn:3",
        "resnet50\n",
        "",
    ):
        assert public_name(own) is None


def test_model_name_containing_a_user_name_is_not_public(monkeypatch):
    monkeypatch.setattr("trainpace.journal.entry.this_machines_names", lambda: ("resnet50",))
    assert public_name("resnet50") is None


def test_own_models_are_numbered():
    done = share([whole_entry(model=model) for model in ("a.py:f", "b.py:f", "a.py:f", "vgg16")])
    assert [run.model for run in done.runs.runs] == [
        "own model 1",
        "own model 2",
        "own model 1",
        "vgg16",
    ]


def test_skipped_run_uses_no_model_number():
    refused = whole_entry(model="a.py:f", execution=Execution(micro_batch=10**10))
    done = share([refused, whole_entry(model="b.py:f")])
    assert [run.model for run in done.runs.runs] == ["own model 1"]
    assert sum(done.left_out.values()) == 1


def test_unusable_runs_are_not_shared():
    done = share(
        [
            entry(kind="import"),
            entry(step_time_ms=None, outcome="timeout"),
            entry(device="My Own Card"),
            entry(step_time_ms=None, outcome="out_of_memory"),
        ]
    )
    assert [run.outcome for run in done.runs.runs] == ["out_of_memory"]
    assert len(done.left_out) == 3
    assert sum(done.left_out.values()) == 3


def test_shared_forecast_excludes_journal_correction():
    one = whole_entry(forecast_ms=12.0, forecast_factor=1.5, forecast_shares=(0.5, 0.5))
    (run,) = share([one]).runs.runs
    assert run.forecast_ms == pytest.approx(8.0)
    assert run.forecast_shares == (0.5, 0.5)


def test_documented_schema_matches_records():
    assert json.loads((ROOT / "docs/shared_runs.schema.json").read_text()) == json.loads(
        json.dumps(schema())
    )


def test_shared_schema_allows_exactly_its_fields():
    run = schema()["$defs"]["SharedRun"]
    assert run["additionalProperties"] is False
    assert schema()["additionalProperties"] is False
    step = StepTime(forward_ms=6.0, backward_ms=4.0)
    whole = whole_entry(
        step=step,
        environment={"torch": "2.4.1+cu121", "cpu": "Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz"},
        sequence_length=8,
        image_size=224,
        reserved_memory_gib=2.0,
        forecast_ms=9.0,
        forecast_shares=(1.0,),
        interval_ms=INTERVAL,
        mode="inference",
    )
    (kept,) = json.loads(text_of(share([whole]).runs))["runs"]
    assert set(kept) == set(run["properties"]) - {"outcome"}
    assert kept["software"] == {"torch": "2.4.1"}
    assert kept["host_cpu"] == "Core i7-8700K"


def test_export_and_shared_file_formats_are_distinguished(tmp_path):
    from trainpace.journal import format_of

    export(tmp_path / "x.json", [whole_entry()])
    assert format_of(tmp_path / "x.json") == "trainpace"
    (tmp_path / "y.json").write_text(text_of(share([whole_entry()]).runs))
    assert format_of(tmp_path / "y.json") == "shared"
