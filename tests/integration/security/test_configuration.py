"""A configuration file runs nothing, whatever stands in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetcapture_py.config import model
from jetcapture_py.errors import ConfigError

MINIMAL = "source: {stream: A, consumer: b}\nstore: {url: /data}\n"


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir [MARK]",
        "!!python/object/new:os.mkdir {args: [MARK]}",
        "!!python/object:pathlib.Path {}",
        "!!python/name:os.system",
        "!!python/module:os",
        "!<tag:yaml.org,2002:python/object/apply:os.mkdir> [MARK]",
        "!!binary aGk=",
        "!!set {a, b}",
        "!!timestamp 2026-01-01",
        "!mine {a: 1}",
    ],
)
@pytest.mark.parametrize("line", ["key: {}", "nats: {}", "store: {{url: /x, options: {{a: {}}}}}", "{}: 1", "{}"])
def test_no_tag_makes_an_object(tmp_path: Path, line: str, value: str) -> None:
    mark = tmp_path / "mark"
    text = line.format(value.replace("MARK", str(mark)))
    if "store" not in text:
        text = f"{MINIMAL}{text}\n"
    problems: tuple[str, ...] = ()
    try:
        model.loads(text, {})
    except ConfigError as error:
        problems = error.problems
    assert problems
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
