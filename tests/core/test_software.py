"""The software record of a step, parsed from common spellings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import TrainpaceError, UnknownName
from trainpace.core.records import from_json, to_json
from trainpace.core.software import (
    ATTENTIONS,
    TODAY,
    Rewrites,
    Software,
    parse_attention,
    parse_software,
    parse_version,
)


@pytest.mark.parametrize(
    ("text", "framework", "version"),
    [
        ("torch2.8", "torch", (2, 8)),
        ("torch 2.8", "torch", (2, 8)),
        ("pytorch-1.9", "torch", (1, 9)),
        ("PyTorch", "torch", ()),
        ("torch==2.8.0+cu128", "torch", (2, 8, 0)),
        ("tensorflow2.4", "tensorflow", (2, 4)),
        ("keras", "tensorflow", ()),
        ("keras 3.1", "tensorflow", ()),
        ("TF v2.4.1", "tensorflow", (2, 4, 1)),
        ("jax", "jax", ()),
        ("torch_0.4.1", "torch", (0, 4, 1)),
    ],
)
def test_parse_software_accepts_common_spellings(text, framework, version):
    software = parse_software(text)
    assert (software.framework, software.version) == (framework, version)


@pytest.mark.parametrize(
    "text", ["mxnet", "", "2.8", "torch28", "torch 9.1", "torch2", "torch two"]
)
def test_parse_software_rejects_unknown_names_and_versions(text):
    with pytest.raises(TrainpaceError, match="unknown") as caught:
        parse_software(text)
    assert "torch2.8" in caught.value.hint


@given(st.text(max_size=30))
def test_arbitrary_text_raises_only_trainpace_errors(text):
    for parse in (parse_software, parse_attention):
        try:
            parse(text)
        except TrainpaceError as error:
            assert str(error)


def test_parse_attention_accepts_names_of_other_libraries():
    assert [parse_attention(name) for name in ATTENTIONS] == list(ATTENTIONS)
    assert (
        parse_attention("flash_attention_2")
        == parse_attention("Flash-2".replace("-", ""))
        == "flash2"
    )
    assert (
        parse_attention("math"),
        parse_attention("xFormers"),
        parse_attention("flash attention 3"),
    ) == ("eager", "efficient", "flash3")
    with pytest.raises(UnknownName, match="flash22") as caught:
        parse_attention("flash22")
    assert "flash2" in caught.value.nearest


@pytest.mark.parametrize(
    ("software", "slow", "fused", "rewrites"),
    [
        (TODAY, "", None, Rewrites()),
        (Software(version=(2, 8)), "", "flash2", Rewrites()),
        (Software(version=(2, 11)), "", None, Rewrites()),
        (Software(version=(2, 1, 2)), "", "flash1", Rewrites(saves_as_eager=True)),
        (
            Software(version=(1, 13)),
            "",
            "flash1",
            Rewrites(eager_attention=True, optimizer="for_loop", saves_as_eager=True),
        ),
        (
            Software(version=(1, 10, 2)),
            "",
            "flash1",
            Rewrites(eager_attention=True, optimizer="for_loop", saves_as_eager=True),
        ),
        (
            Software(version=(1, 9, 1)),
            "host_old_torch",
            "flash1",
            Rewrites(eager_attention=True, optimizer="for_loop", saves_as_eager=True),
        ),
        (
            Software(version=(1, 9), attention="flash2", optimizer="foreach"),
            "host_old_torch",
            "flash2",
            Rewrites(optimizer="foreach", saves_as_eager=True),
        ),
        (Software(framework="tensorflow", version=(1, 9)), "host_tensorflow", None, Rewrites()),
        (
            Software(attention="eager", cross_entropy="fused"),
            "",
            None,
            Rewrites(eager_attention=True, cross_entropy="fused"),
        ),
    ],
)
def test_version_sets_host_attention_and_rewrites(software, slow, fused, rewrites):
    assert (software.slow_host, software.fused_attention, software.rewrites) == (
        slow,
        fused,
        rewrites,
    )


def test_software_survives_json_round_trip():
    software = Software(version=(2, 8, 1), attention="flash3", fp8_recipe="mxfp8")
    assert from_json(to_json(software), Software) == software
    assert software.name == "PyTorch 2.8.1"
    assert TODAY.name == "PyTorch of today"
    assert parse_version("2.8.0a0+5228986c39.nv25.06") == (2, 8, 0)
