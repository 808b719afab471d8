from __future__ import annotations

import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout
from jetcapture_py.archive.stream_config import StreamConfig, is_time, path
from jetcapture_py.errors import JetcaptureError

CREATED = "2026-11-22T12:47:13.123456789Z"
KEPT = StreamConfig(stream="ORDERS", created=CREATED, config={"name": "ORDERS", "max_age": 3_600_000_000_000})


def test_it_comes_back_and_the_same_configuration_gives_the_same_bytes() -> None:
    for config in (KEPT, replace(KEPT, continues=True)):
        assert StreamConfig.decode(config.encode(), "ORDERS", "x.json") == config
    other = StreamConfig(stream="ORDERS", created=CREATED, config=dict(reversed(KEPT.config.items())))
    assert other.encode() == KEPT.encode()


def test_its_name_says_when_the_stream_was_created_and_is_no_object() -> None:
    assert path("ORDERS", CREATED) == "_streams/ORDERS/20261122T124713.123456789Z.json"
    assert layout.parse_path(path("ORDERS", CREATED)) is None
    assert is_time(CREATED)
    for no_time in ("", "../x", "a/b", "2026\n", "1" * 65):
        assert not is_time(no_time)


def test_what_is_damaged_or_of_another_stream_is_refused() -> None:
    for data in (b"", b"{half", b"[]", b'{"stream": "ORDERS"}'):
        with pytest.raises(JetcaptureError, match=r"^x\.json is damaged"):
            StreamConfig.decode(data, "ORDERS", "x.json")
    with pytest.raises(JetcaptureError, match=r"^x\.json belongs to stream X"):
        StreamConfig.decode(KEPT.encode().replace(b"ORDERS", b"X"), "ORDERS", "x.json")
