"""Scalars, comments and repeated keys of YAML and JSON."""

from __future__ import annotations

import math

import pytest

from raydz.config.text import parse_json, parse_yaml
from raydz.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e7", 5e7),
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("+.5e1", 5.0),
        ("1.", 1.0),
        ("-3", -3),
        ("1_000_000", 1_000_000),
        ("010", 10),
        ("0x10", 16),
        (".inf", math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("12:30", "12:30"),
        ("2026-01-02", "2026-01-02"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("'5e7'", "5e7"),
        ("sample:wordnet", "sample:wordnet"),
    ],
)
def test_yaml_scalars_are_those_of_version_1_2(text, value):
    parsed = parse_yaml(text, "here")
    assert parsed == value and type(parsed) is type(value)


def test_yaml_key_given_twice_is_named_with_its_line():
    with pytest.raises(ConfigError, match="given twice") as caught:
        parse_yaml("a:\n  lr: 1\n  lr: 2\nb: 1\nb: 2\n", "demo.yaml")
    assert "lr (line 3)" in caught.value.got and "b (line 5)" in caught.value.got


def test_yaml_merge_key_may_be_overruled():
    assert parse_yaml("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}", "here")["b"] == {"p": 1, "q": 3}


def test_yaml_tag_that_builds_an_object_is_refused():
    with pytest.raises(ConfigError, match="not YAML"):
        parse_yaml("a: !!python/object/apply:os.getcwd []", "here")


def test_broken_yaml_is_placed_but_not_quoted():
    with pytest.raises(ConfigError) as caught:
        parse_yaml("a: 1\npassword: 'hunter2\nb: [", "demo.yaml")
    assert "line" in caught.value.where and "hunter2" not in str(caught.value)


def test_json_may_hold_comments_and_trailing_commas():
    text = """
    { // DeepSpeed reads HJSON
      # so people comment
      "a": 5e7, /* over
      lines */ "uri": "s3://x/#1", "text": "say \\"// no\\", ]",
      "list": [1, 2,],
    }
    """
    assert parse_json(text, "here") == {
        "a": 5e7,
        "uri": "s3://x/#1",
        "text": 'say "// no", ]',
        "list": [1, 2],
    }


def test_json_key_given_twice_is_named_with_its_path():
    with pytest.raises(ConfigError, match="given twice") as caught:
        parse_json('{"a": {"lr": 1, "lr": 2}, "b": [{"c": 1, "c": 2}]}', "ds.json")
    assert "a.lr" in caught.value.got and "b.0.c" in caught.value.got


def test_json_errors_keep_the_line_of_the_file():
    with pytest.raises(ConfigError) as caught:
        parse_json('{ /* one\ntwo */ "a": 1,\n "b" 2}', "ds.json")
    assert "line 3" in caught.value.where


def test_json_nan_is_refused():
    with pytest.raises(ConfigError, match="not JSON"):
        parse_json('{"a": NaN}', "ds.json")
