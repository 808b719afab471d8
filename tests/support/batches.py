"""Batches of messages made of payloads alone, and what is said of each once it is decoded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.config.decoding import FORMATS
from jetcapture_py.config.model import DecodeConfig
from jetcapture_py.transform.batch import Decoded, MessageBatch


@dataclass(frozen=True)
class Declared:
    """A declared column."""

    type: str
    path: str | None = None
    unit: str | None = None


def batch_of(payloads: Sequence[bytes | None]) -> MessageBatch:
    """A batch with `payloads`; everything else in it is null but the sequence."""
    known = {
        layout.PAYLOAD: pa.array(payloads, pa.binary()),
        layout.SEQ: pa.array(range(1, len(payloads) + 1), pa.int64()),
    }
    arrays = [known.get(field.name, pa.nulls(len(payloads), field.type)) for field in ENVELOPE]
    return MessageBatch(stream="TEST", rows=pa.RecordBatch.from_arrays(arrays, schema=ENVELOPE))


def decode_settings(**given: Any) -> Any:
    """The settings of `decode` with their defaults, unchecked."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in DecodeConfig.model_fields.items()}
    settings = {**defaults, "max_inflated": 64 << 20, "conflict": "widen", **given}
    return SimpleNamespace(**settings, known=FORMATS.get(settings["format"]))


def outcomes(decoded: Decoded, messages: int) -> list[dict[str, Any] | None]:
    """The row of each message, None for a failure; asserts that every message is one or the other, once."""
    failed = [failure.index for failure in decoded.failures]
    rows = decoded.fields.to_pylist()
    given = list(range(messages)) if decoded.messages is None else decoded.messages.to_pylist()
    if decoded.fields.num_columns == 0:
        rows = [{} for _ in given]
    assert sorted(given + failed) == list(range(messages))
    assert given == sorted(given)
    assert len(rows) == len(given)
    for failure in decoded.failures:
        assert failure.error
        assert len(failure.error) <= 300
        assert failure.error.isprintable()
    found: list[dict[str, Any] | None] = [None] * messages
    for message, row in zip(given, rows, strict=True):
        found[message] = row
    return found


def hostile(seed: int, valid: Sequence[bytes]) -> list[tuple[bytes, bool]]:
    """`valid` payloads among `HOSTILE` ones in random order, each with whether it is valid."""
    mixed = [(payload, True) for payload in valid] + [(payload, False) for payload in HOSTILE]
    random.Random(seed).shuffle(mixed)
    pairs = [(half, False) for half in HALVES]  # these complete each other only when they stay neighbours
    at = seed % len(mixed)
    return mixed[:at] + pairs + mixed[at:]


HALVES = (b'{"id": 900, "name":', b'"joined"}', b'{"id": 901}, {"id":', b"902}")
HOSTILE: tuple[bytes, ...] = (
    *(b"", b" \n\t ", b'{"id": 1', b'{"id": 1, "name": "tru', b'{"id": 1}{"id": 2}', b'{"id": 1}\n{"id": 2}'),
    *(b'{"id": 1},', b'{"id": 1}]', b'{"id": 1}}', b'[{"id": 1}', b'{"id": 1,}', b"{,}", b"{'id': 1}"),
    *(b"{id: 1}", b'"', b'{"id": 1"}', b'{"name": "a"b"}', b'{"name": "\xff"}', b'{"skipped": "\xff"}'),
    *(b'{"\xc3": 1}', b'{"skipped": "\xed\xa0\x80"}', b'{"skipped": "\xc0\xaf"}', b'{"id": 1}\x00'),
    *(b'\x00{"id": 1}', b'{"name": "\x00"}', b'{"skipped": "a\x01b"}', b'{"skipped": "a\nb"}'),
    *(b'{"skipped": "\\x"}', b'{"skipped": "\\u12g4"}', b'{"id": 01}', b'{"id": +1}', b'{"id": .5}'),
    *(b'{"id": 1.}', b'{"id": 0x10}', b'{"skipped": NaN}', b'{"skipped": Infinity}', b'{"skipped": nul}'),
    *(b'{"skipped": True}', b"[]", b'[{"id": 1}]', b"1", b'"text"', b"null", b"true"),
    *(b'{"skipped": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"skipped": ' + b'{"a":' * 100_000),
    *(b"[" * 100_000, b'{"name": "\\ud800"}', b'{"skipped": "\\udc00"}', b'{"skipped": "\\ud800\\u0041"}'),
    *(b"\xff\xfe{\x00}\x00", b'{"id": 1} // comment', b'{"id" 1}', b'{"id":: 1}', b'{"id": 1 "name": "a"}'),
)
"""Not one of them is a JSON object in UTF-8."""
