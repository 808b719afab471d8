"""Random archives, and the rows that a reader must return: plain values, without any of the readers' code.

An archive is written by the real writer and compacted by the real compaction, up to some phase. Decoders change: a
`Field` has several ways to be stored, and each message was decoded in one of them.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as some

from jetcapture_py.archive import layout
from jetcapture_py.archive.bundles import bundle_of
from jetcapture_py.archive.layout import BlockId
from jetcapture_py.archive.schema import ENVELOPE
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.compaction.files import Files
from jetcapture_py.compaction.plan import units
from jetcapture_py.compaction.unit import CompactionSpec, Failed, Merged, compact_unit
from jetcapture_py.store.archive import ArchiveFiles
from jetcapture_py.store.removal import remove
from tests.support.archives import put

STREAM = "ORDERS"
INTERVAL = 900
BEGIN = datetime(2026, 5, 1, 23, 45, tzinfo=UTC)
"""The first of three buckets, the last bucket of its day."""
KEYS = ("eu", "007", "a/b ü%", None)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way in which a decoder stores a field."""

    type: pa.DataType
    values: some.SearchStrategy[Any]
    mixed: Callable[[Any], Any] = lambda value: value
    """The value that readers return if other objects store the field in another way."""
    name: str = ""
    """The name in objects, if it differs from the field's in its case."""


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _rfc3339(value: datetime) -> str:
    return value.strftime("%Y-%m-%dT%H:%M:%S.%f") + ("Z" if value.tzinfo else "")


_INTS = some.integers(-100, 100)
_LARGE = some.sampled_from([0, 1, -1, 2**53 + 1, -(2**63), 2**63 - 1])
_TEXT = some.text(some.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
_HALVES = some.integers(-9, 9).map(lambda number: number / 2 + 0.25)
_NUMBERS = {0.5: "0.5", -1.0: "-1.0", 1e10: "10000000000.0", 1e-5: "0.00001", 123456.75: "123456.75"}
_NUMBERS |= {math.inf: "Infinity", -math.inf: "-Infinity"}
_MOMENTS = some.integers(0, 10**13).map(lambda micros: _EPOCH + timedelta(microseconds=micros))
_A = (some.none() | _INTS).map(lambda a: {"a": a})
_AB = some.tuples(some.none() | _INTS, some.none() | _TEXT).map(lambda pair: {"a": pair[0], "b": pair[1]})
_A_TYPE = pa.struct([("a", pa.int64())])
_AB_TYPE = pa.struct([("a", pa.int64()), ("b", pa.string())])


def _pairs(values: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    return some.dictionaries(_TEXT, some.none() | values, max_size=3).map(lambda pairs: list(pairs.items()))


def _with_b(value: Row) -> Row:
    return {"b": None, **value}


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _as_float(value: Row) -> Row:
    return {"a": _float(value["a"])}


def _all_with_b(values: Sequence[Row | None]) -> list[Row | None]:
    return [None if value is None else _with_b(value) for value in values]


FIELDS: dict[str, tuple[Way, ...]] = {
    "number": (Way(pa.int64(), _INTS, float), Way(pa.float64(), _HALVES | some.just(math.nan))),
    "object": (Way(_AB_TYPE, _AB, _json), Way(pa.string(), _TEXT)),
    "code": (Way(pa.int32(), _INTS, str), Way(pa.string(), _TEXT)),
    "width": tuple(
        Way(type_, some.integers(0, 100))
        for type_ in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32())
    ),
    "unsigned": (Way(pa.uint64(), some.integers(0, 2**64 - 1)), Way(pa.int64(), _LARGE)),
    "nested": (Way(_A_TYPE, _A, _with_b), Way(_AB_TYPE, _AB)),
    "items": (
        Way(pa.list_(_A_TYPE), some.lists(some.none() | _A, max_size=3), _all_with_b),
        Way(pa.list_(_AB_TYPE), some.lists(some.none() | _AB, max_size=3)),
    ),
    "deep": (
        Way(_A_TYPE, _A, _as_float),
        Way(pa.struct([("a", pa.float64())]), (some.none() | _HALVES).map(lambda a: {"a": a})),
    ),
    "deeper": (
        Way(pa.list_(_A_TYPE), some.lists(_A, max_size=3), lambda items: [*map(_as_float, items)]),
        Way(pa.list_(pa.struct([("a", pa.float64())])), some.lists(_HALVES.map(lambda a: {"a": a}), max_size=3)),
    ),
    "nothing": (Way(pa.null(), some.none()), Way(pa.int64(), _LARGE)),
    "no_day": (Way(pa.null(), some.none()), Way(pa.date32(), some.dates(date(1900, 1, 1), date(2200, 1, 1)))),
    "no_items": (
        Way(pa.list_(pa.null()), some.lists(some.none(), max_size=3)),
        Way(pa.list_(_A_TYPE), some.lists(some.none() | _A, max_size=3)),
    ),
    "flag": (Way(pa.bool_(), some.booleans(), _json), Way(pa.int64(), _INTS, str)),
    "moment": (Way(pa.timestamp("us", "UTC"), _MOMENTS, _rfc3339), Way(pa.string(), _TEXT)),
    "zone": (
        Way(pa.timestamp("us", "UTC"), _MOMENTS, _rfc3339),
        Way(pa.timestamp("us"), _MOMENTS.map(lambda value: value.replace(tzinfo=None)), _rfc3339),
    ),
    "price": (
        Way(pa.decimal128(12, 2), some.decimals(-999, 999, places=2, allow_nan=False)),
        Way(pa.int32(), _INTS, Decimal),
    ),
    "cents": (
        Way(pa.decimal128(12, 2), some.decimals(-999, 999, places=2, allow_nan=False), "{:.2f}".format),
        Way(pa.string(), _TEXT),
    ),
    "ratio": (Way(pa.float32(), _HALVES), Way(pa.float64(), _HALVES)),
    "measure": (Way(pa.float64(), some.sampled_from([*_NUMBERS]), _NUMBERS.__getitem__), Way(pa.string(), _TEXT)),
    "bytes": (Way(pa.binary(), some.binary(max_size=4)), Way(pa.large_binary(), some.binary(max_size=4))),
    "blob": (Way(pa.binary(), _TEXT.map(str.encode), bytes.decode), Way(pa.string(), _TEXT)),
    "day": (Way(pa.date32(), some.dates(date(1900, 1, 1), date(2200, 1, 1)), date.isoformat), Way(pa.string(), _TEXT)),
    "list": (Way(pa.list_(pa.int64()), some.lists(some.none() | _INTS, max_size=3), _json), Way(pa.string(), _TEXT)),
    "map": (
        Way(pa.map_(pa.string(), pa.int64()), _pairs(_INTS), lambda pairs: [(key, _float(n)) for key, n in pairs]),
        Way(pa.map_(pa.string(), pa.float64()), _pairs(_HALVES)),
    ),
    "case": (Way(pa.int64(), _INTS), Way(pa.int64(), _INTS, name="Case")),
    "plain": (Way(pa.string(), _TEXT),),
}
"""Fields by name, and the ways in which decoders have stored each of them."""


@dataclass(frozen=True)
class Version:
    """How messages were decoded for some time."""

    ways: dict[str, int]
    """The way in which each field is stored; others are missing."""
    several: bool
    """Whether messages may have several rows."""


@dataclass(frozen=True)
class Message:
    """A message of the stream."""

    seq: int
    timestamp: datetime
    nanos: int
    key: str | None
    payload: bytes
    headers: list[tuple[str, list[str]]] | None
    version: Version
    rows: list[Row]
    """The values of the fields, in each of its rows; None if it could not be decoded."""
    time: datetime | None
    """Its event time, if buckets are made of that."""
    bad: bool

    @property
    def bucket(self) -> int:
        moment = self.timestamp if self.time is None or self.bad else self.time
        return int(moment.timestamp()) // INTERVAL * INTERVAL


@dataclass
class RandomArchive:
    """An archive that was written from messages."""

    root: Path
    messages: list[Message]
    log: list[str] = field(default_factory=list)
    """What was done, for the report of a failure."""

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def rows(self, *, bad: bool = False) -> list[Row]:
        return [row for _, row in self.pairs(bad=bad)]

    def pairs(self, *, bad: bool = False) -> list[tuple[Message, Row]]:
        messages = [message for message in self.messages if message.bad == bad]
        types: dict[str, set[str]] = defaultdict(set)
        for message in messages if not bad else ():
            for name, way in message.version.ways.items():
                type_ = FIELDS[name][way].type
                types[name].update([str(type_)] if type_ != pa.null() else [])
        several = not bad and any(message.version.several for message in messages)
        pairs = []
        for message in messages:
            for number, values in enumerate([{}] if bad else message.rows):
                row: Row = {layout.ROW: None} if several else {}
                row |= _envelope(message, number)
                if bad:
                    row |= {"stage": "decode", "error": "broken", "raw_headers": None}
                else:
                    row["key"] = message.key
                    for name in types:
                        value = values.get(name)
                        if value is not None and len(types[name]) > 1:
                            value = FIELDS[name][message.version.ways[name]].mixed(value)
                        row[name] = value
                pairs.append((message, row))
        return pairs


def _envelope(message: Message, number: int) -> Row:
    at = datetime.fromtimestamp(message.bucket, UTC)
    row = {
        layout.STREAM: STREAM,
        layout.SUBJECT: _subject(message.key),
        layout.SEQ: message.seq,
        layout.TIMESTAMP: message.timestamp,
        layout.NANOS: message.nanos,
        layout.HEADERS: message.headers,
        layout.PAYLOAD: None if number else message.payload,
        "date": f"{at:%Y-%m-%d}",
        "hour": f"{at:%H}",
    }
    if message.version.several and not message.bad:
        row[layout.ROW] = number
    if message.time is not None and not message.bad:
        row[layout.TIME] = message.time
    return row


def _subject(key: str | None) -> str:
    return f"orders.{'none' if key is None else key.encode().hex()}"


@some.composite
def archives(draw: some.DrawFn, root: Path) -> RandomArchive:
    """Draw an archive and write it below `root`."""
    event = draw(some.booleans())
    names = draw(some.lists(some.sampled_from(sorted(FIELDS)), min_size=1, max_size=8, unique=True))
    several = draw(some.integers(0, 3)) == 0
    versions = draw(some.lists(_versions(names, several=several), min_size=1, max_size=3))
    messages = draw(_histories(versions, event=event))
    archive = RandomArchive(root, messages)
    layouts = draw(some.sampled_from([[0], [4], [0, 4], [4, 2], [0, 12], [12, 4]]))
    chunks = draw(some.integers(1, 4))
    size = -(-len(messages) // chunks)
    copied = draw(some.integers(0, 3))  # messages that were not acknowledged before the next block
    deliveries = [messages[max(0, start - copied) : start + size] for start in range(0, len(messages), size)]
    again = some.lists(some.sampled_from(messages), min_size=1, unique_by=id)
    deliveries += draw(some.lists(again, max_size=3))
    for number, delivery in enumerate(deliveries, 1):
        bundles = draw(some.sampled_from(layouts))
        archive.log.append(f"{bundles} bundles: {sorted((message.seq, message.timestamp) for message in delivery)}")
        _write(root, delivery, bundles, number, event=event)
    phase = draw(some.sampled_from(["none", "written", "half removed", "removed"]))
    if phase != "none":
        target = draw(some.sampled_from([2_000, 6_000, 1 << 20]))
        archive.log.append(f"compacted: {phase}, {target} bytes")
        _compact(archive.url, target, {"written": 0.0, "half removed": 0.5, "removed": 1.0}[phase])
    return archive


@some.composite
def _versions(draw: some.DrawFn, names: Sequence[str], *, several: bool) -> Version:
    ways = {name: draw(some.integers(-1, len(FIELDS[name]) - 1)) for name in names}
    given = {name: way for name, way in ways.items() if way >= 0}
    return Version(given, several=several and draw(some.booleans()))


@some.composite
def _histories(draw: some.DrawFn, versions: Sequence[Version], *, event: bool) -> list[Message]:
    """Draw the messages of a stream, which may have been created again."""
    count = draw(some.integers(1, 16))
    buckets = draw(some.sampled_from([1, 1, 3]))
    keys = draw(some.sampled_from([KEYS[:1], KEYS[1:3], KEYS]))
    micros = sorted(draw(some.lists(some.integers(0, buckets * INTERVAL * 10**6 - 1), min_size=count, max_size=count)))
    again = draw(some.none() | some.integers(1, count))
    messages = []
    for number, offset in enumerate(micros):
        version = versions[number * len(versions) // count]
        rows = draw(some.integers(1, 3)) if version.several else 1
        seq = number + 1 if again is None or number < again else number + 1 - again
        timestamp = BEGIN + timedelta(microseconds=offset + number)
        late = draw(some.integers(0, INTERVAL * 10**6)) if event else 0
        fields = {name: FIELDS[name][way].values for name, way in version.ways.items()}
        messages.append(
            Message(
                seq=seq,
                timestamp=timestamp,
                nanos=number,
                key=draw(some.sampled_from(keys)),
                payload=b"%d" % number,
                headers=draw(some.sampled_from([None, [("H", ["1", "é"])]])),
                version=version,
                rows=[{name: draw(some.none() | values) for name, values in fields.items()} for _ in range(rows)],
                time=timestamp - timedelta(microseconds=late) if event else None,
                bad=draw(some.integers(0, 7)) == 0,
            )
        )
    return messages


def _write(root: Path, messages: Sequence[Message], bundles: int, delivered: int, *, event: bool) -> None:
    """Store messages as a capture does: one object for each key or bundle, bucket and version."""
    blocks: dict[tuple[BlockId, int], list[Message]] = defaultdict(list)
    for message in messages:
        if message.bad:
            block = BlockId(key=None, bucket=message.bucket, quarantine=True)
        elif bundles:
            block = BlockId(key=None, bucket=message.bucket, bundle=bundle_of(message.key, bundles))
        else:
            block = BlockId(key=message.key, bucket=message.bucket)
        blocks[block, 0 if message.bad else id(message.version)].append(message)
    time = "header.at" if event else layout.STREAM_TIME
    encoder = Encoder(stream=STREAM, interval=INTERVAL, compression="zstd", bundles=bundles, time=time)
    for (block, _), members in blocks.items():
        put(root, encoder.encode(block, "age", [_batch(members, delivered, with_keys=bool(block.bundle))]))


def _batch(messages: Sequence[Message], delivered: int, *, with_keys: bool) -> pa.RecordBatch:
    """The rows of messages of one version, or of the quarantine."""
    first = messages[0]
    rows = [
        (message, _envelope(message, number), values)
        for message in messages
        for number, values in enumerate([{}] if message.bad else message.rows)
    ]
    envelopes = [envelope for _, envelope, _ in rows]
    columns = {
        type_.name: pa.array([envelope.get(type_.name) for envelope in envelopes], type_.type) for type_ in ENVELOPE
    }
    columns[layout.DELIVERED] = pa.array([delivered] * len(rows), pa.int32())
    if first.bad:
        texts = {layout.STAGE: "decode", layout.ERROR: "broken"}
        columns |= {name: pa.array([text] * len(rows), pa.string()) for name, text in texts.items()}
        columns[layout.RAW_HEADERS] = pa.nulls(len(rows), pa.binary())
        return pa.RecordBatch.from_pydict(columns)
    if first.version.several:
        columns[layout.ROW] = pa.array([envelope[layout.ROW] for envelope in envelopes], pa.int32())
    if first.time is not None:
        times = [envelope[layout.TIME] for envelope in envelopes]
        columns[layout.TIME] = pa.array(times, pa.timestamp("us", "UTC"))
    if with_keys:
        columns[layout.KEY] = pa.array([message.key for message, _, _ in rows], pa.string())
    for name, way in first.version.ways.items():
        chosen = FIELDS[name][way]
        columns[chosen.name or name] = pa.array([values[name] for *_, values in rows], chosen.type)
    return pa.RecordBatch.from_pydict(columns)


def _compact(url: str, target: int, removed: float) -> None:
    """Compact archive and quarantine, up to the removal of this share of the objects that were replaced."""
    files = Files(ArchiveFiles(url, {}))
    spec = CompactionSpec(target=target, closed=BEGIN.timestamp() + 10 * 86_400)
    for directory in (STREAM, f"{layout.QUARANTINE}/{STREAM}"):
        for unit in list(units(files.find([directory]), target)):
            for outcome in compact_unit(files, spec, unit.sources):
                assert not isinstance(outcome, Failed), outcome
                if not isinstance(outcome, Merged):
                    continue
                removals = outcome.removals[: round(len(outcome.removals) * removed)]
                assert all(result is True for result in remove(files.archive, removals))


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Bring rows into one order and form: folded names, and values that can be compared, without the delivery count."""
    shaped = [
        {name.casefold(): _value(value) for name, value in row.items() if name != layout.DELIVERED} for row in rows
    ]
    return sorted(shaped, key=lambda row: (row[layout.SEQ], row[layout.TIMESTAMP], row.get(layout.ROW) or 0))


def _value(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, dict):
        return {name: _value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(inner) for inner in value]
    return value
