"""`source.bucket` and `source.object_store` in place of `source.stream`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from jetcapture_py.config import model
from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.errors import ConfigError


def load(**sections: Any) -> model.Config:
    return model.parse({"store": {"url": "/archive"}, **sections})


def test_a_bucket_names_its_stream_and_the_default_key() -> None:
    for source, stream, key in (
        ({"bucket": "settings"}, "KV_settings", ""),
        ({"bucket": "a-b_C9", "stream": None}, "KV_a-b_C9", ""),
        ({"object_store": "files"}, "OBJ_files", "{subject[2]}"),
        ({"stream": "KV_settings"}, "KV_settings", "{subject[0]}"),
    ):
        found = load(source={**source, "consumer": "archive"})
        assert (found.source.stream, found.key) == (stream, key)
        assert load(source={**source, "consumer": "archive"}, key="{subject[1]}").key == "{subject[1]}"


def test_wrong_sources_are_refused_in_one_line() -> None:
    expected = {
        "source: {bucket: s, stream: KV_s}": "source.bucket: cannot be combined with stream",
        "source: {bucket: s, object_store: s}": "source.object_store: cannot be combined with bucket",
        "source: {bucket: a.b}": "source.bucket: expected ASCII letters, digits, '-' and '_', got \"a.b\"",
        "source: {object_store: 7}": "source.object_store: expected text, got 7; put it in quotes",
        "source: {}": "source.stream: required, but not set",
        "{source: {bucket: s}, stream: {name: s}}": 'stream.name: expected KV_s, as in source.bucket, got "s"',
        "{source: {object_store: s}, decode: {format: json}}": "decode.format: only raw with "
        "source.object_store, whose messages are parts of files",
        "{source: {bucket: s}, decode: {format: json}, block: {time: at}}": "block.time_fallback: required with "
        "source.bucket and a field: deletions have none, so set it to timestamp",
    }
    for text, problem in expected.items():
        sections = yaml.safe_load(text)
        sections["source"]["consumer"] = "archive"
        with pytest.raises(ConfigError) as caught:
            load(**sections)
        assert caught.value.problems == (problem,)


def test_a_stream_tells_which_bucket_it_holds() -> None:
    assert bucket_of("KV_settings") == ("bucket", "settings")
    assert bucket_of("OBJ_files") == ("object_store", "files")
    assert [name for name in ("KV_", "KV_a=b", "ORDERS") if bucket_of(name)] == []
