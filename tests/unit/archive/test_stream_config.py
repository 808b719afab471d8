from __future__ import annotations

import pytest
from msgspec.structs import replace

from jetcapture_py.archive import layout
from jetcapture_py.archive.stream_config import StreamConfig, is_time, path
from jetcapture_py.errors import JetcaptureError

CREATED = "2026-11-22T12:47:13.123456789Z"
KEPT = StreamConfig(stream="ORDERS", created=CREATED, config={"name": "ORDERS", "max_age": 3_600_000_000_000})


def test_it_comes_back_and_the_same_configuration_gives_the_same_bytes() -> None:
    assert StreamConfig.decode(KEPT.encode(), "ORDERS", "x.json") == KEPT
    other = StreamConfig(stream="ORDERS", created=CREATED, config=dict(reversed(KEPT.config.items())))
    assert other.encode() == KEPT.encode()
    continued = replace(KEPT, continues=True)
    assert StreamConfig.decode(continued.encode(), "ORDERS", "x.json") == continued


def test_its_name_says_when_the_stream_was_created_and_is_no_object() -> None:
    assert path("ORDERS", CREATED) == "_streams/ORDERS/20261122T124713.123456789Z.json"
    assert layout.parse_path(path("ORDERS", CREATED)) is None


@pytest.mark.parametrize("created", ["", "../x", "a/b", "2026\n", "1" * 65])
def test_what_is_no_time_names_no_file(created: str) -> None:
    assert not is_time(created)
    assert is_time(CREATED)


@pytest.mark.parametrize(
    "data", [b"", b"{half", b"[]", b'{"stream": "ORDERS"}', KEPT.encode().replace(b"ORDERS", b"X")]
)
def test_what_is_damaged_or_of_another_stream_is_refused(data: bytes) -> None:
    with pytest.raises(JetcaptureError, match=r"^x\.json (is damaged|belongs to stream X)"):
        StreamConfig.decode(data, "ORDERS", "x.json")
