"""A configuration file runs nothing, whatever stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.config import model
from jetcapture_py.errors import ConfigError

MINIMAL = "source: {stream: A, consumer: b}\nstore: {url: /data}\n"


@pytest.mark.parametrize("line", ["key: {}", "store: {{url: /x, options: {{a: {}}}}}", "{}: 1"])
def test_no_tag_makes_an_object(tmp_path: Path, line: str) -> None:
    mark = tmp_path / "mark"
    for value in (
        f"!!python/object/apply:os.mkdir [{mark}]",
        f"!<tag:yaml.org,2002:python/object/apply:os.mkdir> [{mark}]",
        "!!python/name:os.system",
        "!!binary aGk=",
        "!mine {a: 1}",
    ):
        text = line.format(value)
        with pytest.raises(ConfigError):
            model.loads(text if "store" in text else f"{MINIMAL}{text}\n", {})
    assert not mark.exists()


def test_names_given_twice_are_refused_at_every_level() -> None:
    for text in (
        "source: {stream: A, consumer: b}\nstore: {url: /data, options: {a: {b: 1, b: 2}}}\n",
        f'{MINIMAL}"key": a\nkey: b\n',
    ):
        with pytest.raises(ConfigError, match="set twice, on line"):
            model.loads(text, {})
    merge = "base: &base {stream: X}\nsource: {<<: *base, consumer: b}\nstore: {url: /data}\n"
    with pytest.raises(ConfigError, match="unknown setting"):
        model.loads(merge, {})
