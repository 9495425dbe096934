"""Setting one key of a JSON or YAML text leaves the rest unchanged."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainpace.configs.syntax import set_key
from trainpace.core.errors import TrainpaceError


def edited(text, path, value, syntax="yaml"):
    return set_key(text, "f", syntax, tuple(path.split(".")), value)


@pytest.mark.parametrize(
    ("before", "path", "value", "after"),
    [
        ("a: 1  # one\nb: 2\n", "a", 8, "a: 8  # one\nb: 2\n"),
        (
            "a:\n  # said\n  b: 1\n\n# end\nc: 3\n",
            "a.d",
            True,
            "a:\n  # said\n  b: 1\n  d: true\n\n# end\nc: 3\n",
        ),
        ("a:\nb: 1\n", "a", 2, "a: 2\nb: 1\n"),
        ("a: null # none\n", "a.b.c", 2, "a:\n  b:\n    c: 2 # none\n"),
        ("a: {}\nb: 1\n", "a.b", "x", "a: {b: x}\nb: 1\n"),
        ("a: {x: 1, y: {z: 2}}\n", "a.y.w", "no", "a: {x: 1, y: {z: 2, w: 'no'}}\n"),
        ("a:\n    - 1\n    - 2\nb: 1", "a", 4, "a: 4\nb: 1"),
        ("a: [2, 3] # two\n", "a", 4, "a: 4 # two\n"),
        ("a: 'no'\n", "a", "bf16", "a: 'bf16'\n"),
        ('a: "no"\n', "a", "bf16", 'a: "bf16"\n'),
        ("a: no\n", "a", "no", "a: 'no'\n"),
        ("a: True\n", "a", False, "a: False\n"),
        ("a: ddp\nb: 1\n", "a.class_path", "x.Y", "a:\n  class_path: x.Y\nb: 1\n"),
        ("a: 1", "b", 2, "a: 1\nb: 2\n"),
        ("a: 1\r\nb: 2\r\n", "c", 2, "a: 1\r\nb: 2\r\nc: 2\r\n"),
        ("x: &k 4\na: *k\nb: 1\n", "b", 2, "x: &k 4\na: *k\nb: 2\n"),
        (
            "base: &b {a: 1}\nt:\n  <<: *b\n  c: 2\n",
            "t.a",
            5,
            "base: &b {a: 1}\nt:\n  <<: *b\n  c: 2\n  a: 5\n",
        ),
        ("a: |\n  text\n  more\nb: 1\n", "b", 2, "a: |\n  text\n  more\nb: 2\n"),
        ("\ufeffa: 1\n", "a", 2, "\ufeffa: 2\n"),
    ],
)
def test_yaml_key_is_edited_in_place(before, path, value, after):
    assert edited(before, path, value) == after


@pytest.mark.parametrize(
    ("before", "path", "value", "after"),
    [
        ('{"a": 1,   "b": [1,2]}', "a", 8, '{"a": 8,   "b": [1,2]}'),
        ('{\n\t"a": {}\n}\n', "a.b", 8, '{\n\t"a": {\n\t\t"b": 8\n\t}\n}\n'),
        ('{"a": {}}', "a.b.c", "x", '{"a": {"b": {"c": "x"}}}'),
        (
            '{\n    "a": 1\n}',
            "z.y",
            True,
            '{\n    "a": 1,\n    "z": {\n        "y": true\n    }\n}',
        ),
        ('{"a": "auto", "b": 1e-4}', "a", 3, '{"a": 3, "b": 1e-4}'),
        ('{"a": null}', "a.b", 3, '{"a": {"b": 3}}'),
        ('{"\\u0061": 1}', "a", 3, '{"\\u0061": 3}'),
    ],
)
def test_json_key_is_edited_in_place(before, path, value, after):
    assert edited(before, path, value, "json") == after


@pytest.mark.parametrize(
    "text", ["a: &k 4\nb: *k\n", "a: !!int 4\n", "b: &k 4\na: *k\n", "a: >\n  4\n"]
)
def test_uneditable_yaml_is_rejected(text):
    with pytest.raises(TrainpaceError):
        edited(text, "a", 5)


keys = st.sampled_from("abcdef")
scalars = st.one_of(
    st.integers(-5, 5),
    st.booleans(),
    st.none(),
    st.sampled_from(["no", "x y", "#", "a: b", "1e-4", "ü", ""]),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.dictionaries(keys, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=8,
)
documents = st.dictionaries(keys, trees, min_size=1, max_size=4)


def with_set(data, path, value):
    if not path:
        return value
    inside = data if isinstance(data, dict) else {}
    return {**inside, path[0]: with_set(inside.get(path[0]), path[1:], value)}


@given(
    documents,
    st.lists(keys, min_size=1, max_size=3),
    st.one_of(st.integers(0, 9), st.booleans(), st.sampled_from(["no", "bf16", "x.Y"])),
    st.sampled_from(["json", "indented", "yaml", "flow"]),
)
def test_edit_changes_only_the_given_key(data, path, value, style):
    dump = {
        "json": json.dumps,
        "indented": lambda d: json.dumps(d, indent=2),
        "yaml": lambda d: yaml.safe_dump(d, sort_keys=False, indent=4),
        "flow": lambda d: yaml.safe_dump(d, default_flow_style=True),
    }[style]
    is_json = style in ("json", "indented")
    expected = with_set(data, path, value)
    after = set_key(dump(data), "f", "json" if is_json else "yaml", tuple(path), value)
    found = json.loads(after) if is_json else yaml.safe_load(after)
    assert found == expected
    assert json.dumps(found, sort_keys=not is_json) == json.dumps(
        expected, sort_keys=not is_json
    )  # distinguishes 1 from true
