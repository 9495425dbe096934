"""Reading an external file returns its content or raises a one-line error that names the file."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpace.core.errors import UnreadableInput
from trainpace.core.intake import DEEPEST, json_of, read_bytes, read_json, read_text, toml_of
from trainpace.core.records import from_json
from trainpace.job import Schedule


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"[" * 200_000, "levels deep"),
        (b"[" * 500 + b"]" * 500, "levels deep"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "levels deep"),
        (b"9" * 5000, "thousands of digits"),
        (b'{"a": [1, ' + b"9" * 400 + b"]}", "hundreds of digits"),
        (b"{", "line 1"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        (b"", "not valid JSON"),
    ],
)
def test_invalid_json_is_rejected_with_file_name(tmp_path, content, word):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UnreadableInput, match=word) as caught:
        read_json(tmp_path / "a.json")
    assert "a.json" in caught.value.message


def test_json_is_read_up_to_nesting_limit():
    assert json_of("[" * DEEPEST + "]" * DEEPEST, "it")
    with pytest.raises(UnreadableInput):
        json_of("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "it")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (".".join(["a"] * 20_000) + " = 1", "line 1 has a key"),
        ("[" + " . ".join(["a"] * 2_000) + "]", "line 1 has a key"),
        ("a = " + "[" * 5000, "levels deep"),
        ("a = " + "[" * 200 + "]" * 200, "levels deep"),
        ("a = " + "9" * 5000, "thousands of digits"),
        ("a = " + "9" * 400, "hundreds of digits"),
        ("a = ", "not valid TOML"),
        ("a = 1\n" * (1 << 20), "larger than 4 MiB"),
    ],
)
def test_invalid_toml_is_rejected(text, word):
    with pytest.raises(UnreadableInput, match=word):
        toml_of(text, "m.toml")


def test_dots_in_toml_comments_and_strings_are_accepted():
    dots = "." * 60
    assert toml_of(f'# {dots}\na = "{dots}"\nb = """\n{dots}\n"""', "m.toml") == {
        "a": dots,
        "b": f"{dots}\n",
    }


def test_read_bytes_accepts_only_regular_files_of_limited_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # without a writer
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, word in {
        "pipe": "a pipe",
        "sparse": "larger than 256 MiB",
        "": "is a directory",
        "none": "no such file",
    }.items():
        with pytest.raises(UnreadableInput, match=word):
            read_bytes(tmp_path / name)
    with pytest.raises(UnreadableInput, match="a device"):
        read_bytes("/dev/zero")
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(UnreadableInput, match="UTF-8"):
        read_text(tmp_path / "a")


def test_deeply_nested_record_is_rejected():
    with pytest.raises(UnreadableInput, match="nested too deeply"):
        from_json('{"record": "Schedule", "schema_version": 1, "a": ' + "[" * 100_000, Schedule)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_json_of_agrees_with_standard_library(value):
    text = json.dumps(value)
    assert repr(json_of(text, "it")) == repr(json.loads(text))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_arbitrary_content_is_parsed_or_rejected_with_name(content):
    for read in (json_of, toml_of):
        try:
            read(content, "it")
        except UnreadableInput as error:
            assert str(error).startswith("it ")


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', b'["\\uDC00"]', '{"\\ud83d": 1}'])
def test_unpaired_surrogates_are_rejected(text):
    with pytest.raises(UnreadableInput, match="half of a surrogate pair"):
        json_of(text, "m.json")
    assert json_of('["\\ud83d\\ude00 \\u00e9"]', "m.json") == ["\U0001f600 é"]
