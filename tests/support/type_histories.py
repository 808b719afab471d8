"""Random histories of fields that change type, and the model of what their archive must have.

The model is the list of what was published. It takes each object's types as its schema has them: replicas that meet a
field at once may differ in their first objects, and then events say so.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from jetcapture_py.archive import layout
from jetcapture_py.capture.pipeline import Capture
from tests.support.publishing import Publisher
from tests.support.running import capture_all, config, connection, objects, until

Json = dict[str, Any]
Make = Callable[[random.Random], Any]
Names = tuple[str, ...]
"""The path of a field: names, and `[]` for the elements of a list."""
OWN = frozenset((*layout.ENVELOPE, *layout.OPTIONAL, *layout.PARTITIONS))
EPOCH = datetime(2026, 5, 1, tzinfo=UTC)
EXACT = 2**53


def one_of(*values: Any) -> Make:
    return lambda chance: chance.choice(values)


def fields(**makes: Make) -> Make:
    """An object with some of these fields."""

    def make(chance: random.Random) -> Json:
        return {name: make(chance) for name, make in makes.items() if chance.random() < 0.7}

    return make


def items(*makes: Make) -> Make:
    return lambda chance: [chance.choice(makes)(chance) for _ in range(chance.randrange(4))]


NUMBER, TEXT = one_of(*range(8)), one_of("n/a", "", "ü,\n", '"', "7")
HALF, FRACTION = one_of(0.5, -2.25, 3.0, 1e10), one_of(0.1, 1e-7, 2.0**60)
LARGE, BEYOND = one_of(EXACT, EXACT + 1, -EXACT - 1, 2**56 + 1), one_of(2**63, 2**64 - 1)
FLAG, NOTHING = one_of(*map(bool, (0, 1))), one_of(None)
ITEM = fields(sku=TEXT, n=NUMBER)
MOMENT = one_of(EPOCH, EPOCH + timedelta(microseconds=1))
WAYS: dict[str, Sequence[Make]] = {
    "id": (NUMBER, NUMBER, TEXT),
    "price": (NUMBER, HALF, FRACTION, TEXT),
    "size": (NUMBER, LARGE, BEYOND, HALF),
    "flag": (FLAG, NUMBER, TEXT),
    "who": (fields(name=TEXT), fields(name=TEXT, zip=NUMBER), fields(zip=HALF, Name=FLAG), TEXT, fields()),
    "deep": (fields(a=fields(b=NUMBER)), fields(a=fields(b=TEXT, c=LARGE)), fields(a=items(NUMBER))),
    "goods": (items(NUMBER), items(HALF, TEXT), items(ITEM), items(ITEM, NUMBER), items(items(NUMBER, FLAG))),
    "empty": (NOTHING, NOTHING, NUMBER, TEXT, items(NOTHING), one_of([])),
    "late": (HALF, TEXT),
    "code": (NUMBER, TEXT),
    "Code": (TEXT, NUMBER),
    "blob": (one_of(b"", b"\xff"), TEXT, NUMBER),
    "made": (MOMENT, TEXT, NUMBER),
    "ratio": (one_of(math.nan, math.inf, 0.5), NUMBER, TEXT),
}
"""The ways in which fields change; the last three only in MessagePack."""


# ---------------------------------------------------------------------- a history


class History:
    """What was published, and the replicas that capture it."""

    def __init__(self, seed: int, url: str, root: Path) -> None:
        self.chance = chance = random.Random(seed)
        self.root, self.stream = root, f"H{seed}"
        self.sent: dict[int, Json] = {}
        self.payloads: dict[int, bytes] = {}
        self.refused: set[int] = set()
        """Messages in the quarantine."""
        self.events: list[Json] = []
        """The fields of `column.changed`, for a test to set."""
        self.conflict = chance.choice(["rescue"] * 8 + ["widen", "quarantine"])
        self.format = chance.choice(["parquet"] * 6 + ["ndjson", "csv"])
        self.msgpack, self.limit = chance.random() < 0.3, chance.choice([1, 2, 3])
        self.alone = self.limit == 1
        """Whether each replica has ended when the next one begins; a killed one may still be storing."""
        self.running: list[tuple[Capture, asyncio.Task[None], asyncio.Event]] = []
        texts = self.conflict == "widen" or self.format == "csv"
        self.form = "text" if texts else "json" if self.format == "ndjson" else "parquet"
        self.now = {name: 0 for name in WAYS if self._has(name)}
        self.late = chance.randrange(60)
        self.config = config(
            url,
            root,
            source={"stream": self.stream, "consumer": "c", "ack_wait": "1s"},
            decode={"format": "msgpack" if self.msgpack else "json", "on_conflict": self.conflict},
            block={
                "max_age": "100ms",
                "max_messages": chance.choice([3, 10, 40]),
                "bundles": chance.choice([0, 0, 3]),
                "format": self.format,
                "compression": "zstd" if self.format == "parquet" else "none",
            },
            key=chance.choice(["", "{subject[1]}"]),
        )
        settings = (self.config.decode, self.config.block)
        self.told = [f"{[part.model_dump(exclude_defaults=True) for part in settings]}, {self.limit} replicas"]

    def _has(self, name: str) -> bool:
        """Whether messages have a field."""
        if self.conflict == "widen":  # each process names names that differ in case; bytes may be no text
            return name not in ("Code", "who", "blob", "made", "ratio")
        if name == "ratio" and self.format == "ndjson":  # JSON has neither NaN nor infinities
            return False
        return self.msgpack or name not in ("blob", "made", "ratio")

    async def run(self) -> None:
        chance = self.chance
        async with connection(self.config.nats.servers[0]) as client:
            await client.jetstream().add_stream(name=self.stream, subjects=[f"{self.stream}.>"])
            async with Publisher(client) as self.publisher:
                await self.publish()
                try:
                    await self.start()
                    for _ in range(chance.randrange(5, 12)):
                        step = chance.choice([self.publish] * 4 + [self.start] * 3 + [self.stop, self.kill, self.wait])
                        self.told.append(step.__name__)
                        await step()
                finally:
                    while self.running:
                        await self.stop()
                await self.publish()
                await capture_all(self.config)

    async def publish(self) -> None:
        chance = self.chance
        for name in self.now:
            if chance.random() < 0.2:
                self.now[name] = chance.randrange(len(WAYS[name]))
        for _ in range(chance.randrange(1, 16)):
            document = {}
            for name, way in self.now.items():
                make = WAYS[name][way] if chance.random() < 0.95 else chance.choice(WAYS[name])
                if chance.random() < 0.6 and (name != "late" or len(self.sent) >= self.late):
                    document[name] = make(chance)
            payload = (msgspec.msgpack if self.msgpack else msgspec.json).encode(document)
            self.sent[len(self.sent) + 1] = document
            self.payloads[len(self.sent)] = payload
            await self.publisher.publish(f"{self.stream}.{chance.choice('ab')}", payload)
        await self.publisher.flush()

    async def start(self) -> None:
        if len(self.running) < self.limit:
            capture, stop = Capture(self.config), asyncio.Event()
            task = asyncio.create_task(capture.run(stop))
            self.running.append((capture, task, stop))
            await until(lambda: capture.opened or task.done(), "it has started")

    async def stop(self) -> None:
        if self.running:
            _, task, stop = self.running.pop(self.chance.randrange(len(self.running)))
            stop.set()
            await task

    async def kill(self) -> None:
        """End one at once. What it has not acknowledged comes back at once, or after a while."""
        if self.running:
            self.alone = False
            capture, task, _ = self.running.pop(self.chance.randrange(len(self.running)))
            if self.chance.random() < 0.5:
                capture.acks.close = lambda _: capture.source.link.close()  # type: ignore[method-assign, assignment]
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()

    async def wait(self) -> None:
        await asyncio.sleep(self.chance.choice([0.01, 0.1, 0.3]))

    # ------------------------------------------------------------------ what the archive has

    def types(self) -> Json:
        """The file of types."""
        if self.conflict == "widen":
            return {}
        return dict(json.loads((self.root / "_columns" / self.stream / "c.json").read_text())["types"])

    def schemas(self) -> list[pa.Schema]:
        return [pq.read_schema(self.root / name.path) for name in objects(self.root) if not name.quarantine]

    def rows(self) -> Iterator[tuple[int, Json]]:
        """The rows of every object, copies as well, with their sequences; those of the quarantine are `refused`."""
        for name in objects(self.root):
            path = self.root / name.path
            if self.format == "parquet" or name.quarantine:
                rows = pq.ParquetFile(path).read().to_pylist()
            elif self.format == "ndjson":
                rows = [json.loads(line) for line in path.read_text().splitlines()]
            else:
                rows = list(csv.DictReader(io.StringIO(path.read_text(), newline="")))
                rows = [{name: None if text == "\\N" else text for name, text in row.items()} for row in rows]
            for row in rows:
                seq = int(row[layout.SEQ])
                assert row.get(layout.PAYLOAD, self.payloads[seq]) == self.payloads[seq]
                if name.quarantine:
                    assert self.conflict == "quarantine", row
                    self.refused.add(seq)
                else:
                    yield seq, row


# ---------------------------------------------------------------------- the model: nothing is lost


class Rescued(NamedTuple):
    """A value from `_nats_rescued`."""

    value: Any


def plain(value: Any) -> Any:
    """Without nulls, missing fields and empty objects and lists, which columns do not tell from one another."""
    if isinstance(value, Rescued):
        return None if (inner := plain(value.value)) is None else Rescued(inner)
    if isinstance(value, dict):
        return {name: inner for name, field in value.items() if (inner := plain(field)) is not None} or None
    if isinstance(value, list):
        found = [plain(item) for item in value]
        while found and found[-1] is None:
            found.pop()
        return found or None
    return value


def same(found: Any, sent: Any, form: str) -> bool:
    """Whether a stored value is the one that was sent, in type as well.

    `form` is how it is stored: `parquet`; `json`, where bytes and times are text; `text`, which is also what a column
    has for a value that is no text, as its JSON.
    """
    if isinstance(found, Rescued):
        found, form = found.value, "json"
    if type(found) is type(sent) and not isinstance(sent, dict | list):
        return bool(found == sent) or (sent != sent and found != found)
    if form == "text" and isinstance(found, str) and isinstance(sent, bytes | datetime):
        found = found.strip('"')
    if isinstance(found, str) and isinstance(sent, bytes) and form != "parquet":
        return base64.b64decode(found) == sent
    if isinstance(found, str) and isinstance(sent, datetime) and form != "parquet":
        return datetime.fromisoformat(found) == sent
    if isinstance(found, str) and isinstance(sent, float) and form != "parquet":
        return float(found) == sent or (sent != sent and found.lower() == "nan")
    if isinstance(found, str) and not isinstance(sent, str) and form == "text":
        found, form = plain(json.loads(found)), "json"
    if isinstance(sent, dict) and isinstance(found, dict):
        return found.keys() == sent.keys() and all(same(found[name], sent[name], form) for name in sent)
    if isinstance(sent, list) and isinstance(found, list):
        return len(found) == len(sent) and all(same(*pair, form) for pair in zip(found, sent, strict=True))
    number = isinstance(sent, int | float) and not isinstance(sent, bool) and not isinstance(found, bool)
    return bool(found == sent) and (number or type(found) is type(sent))


def named(value: Any) -> Any:
    """A value by the names in messages: of names that differ in case only, later ones got `_`."""
    if isinstance(value, dict):
        return {name.rstrip("_"): named(inner) for name, inner in value.items()}
    return [named(item) for item in value] if isinstance(value, list) else value


def keys_of(path: str) -> list[str | int]:
    return [int(part[:-1]) if part.endswith("]") else part for part in path.replace("[", ".").split(".")]


def put_back(document: Json, path: str, value: Any) -> None:
    """Put a rescued value back to its path, where there must be nothing."""
    at: Any = document
    keys = keys_of(path)
    for key, following in pairwise(keys):
        at = filled(at, key, [] if isinstance(following, int) else {})
    assert plain(filled(at, keys[-1], Rescued(value))) == plain(Rescued(value)), (
        f"{path} is rescued, and in its column: {at}"
    )


def filled(at: Any, key: str | int, value: Any) -> Any:
    """What is at a key, or this value where there is nothing."""
    if isinstance(key, int):
        at += [None] * (key + 1 - len(at))
    elif key not in at:
        at[key] = None
    at[key] = value if at[key] is None else at[key]
    return at[key]


def fits(type_: Any, value: Any) -> bool:
    """Whether a column of a type of the file has this value, or changes nothing when it widens to it."""
    if type_ is None:
        return not isinstance(value, int) or value < 2**63
    if isinstance(type_, list):
        return isinstance(value, list)
    if isinstance(type_, dict):
        return isinstance(value, dict)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "bool": isinstance(value, bool),
        "int53": number and not (isinstance(value, int) and not -(2**63) <= value < 2**63),
        "int64": number and isinstance(value, int) and -(2**63) <= value < 2**63,
        "double": number and (isinstance(value, float) or abs(value) <= EXACT),
        "string": isinstance(value, str),
        "binary": isinstance(value, bytes),
        "timestamp": isinstance(value, datetime),
    }[type_]


def at_path(value: Any, path: str) -> Any:
    """A value inside a document; or a type inside the types, where every element of a list has the same one."""
    for key in keys_of(path):
        if isinstance(key, int) and isinstance(value, list):
            value = value[min(key, len(value) - 1)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


class Read(NamedTuple):
    """What was rescued of each message, by path; and the paths that copies of a message do not agree about."""

    rescued: dict[int, Json]
    doubtful: set[str]


def unpacked(value: Any) -> Any:
    """Objects and lists in place of their JSON, which no message has as text."""
    if isinstance(value, dict):
        return {name: unpacked(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [unpacked(inner) for inner in value]
    return unpacked(json.loads(value)) if isinstance(value, str) and value[:1] in ("[", "{") else value


def check_rows(history: History, rows: Iterable[tuple[int, Json]], form: str, without: Collection[str] = ()) -> Read:
    """Every row has every value of its message, in the column or rescued; but `without` some columns."""
    types, sent = history.types(), history.sent
    allowed = Kinds(history)
    read = Read({}, set())
    for seq, stored in rows:
        columns = {name: value for name, value in stored.items() if name not in OWN}
        row = named(unpacked(columns) if form == "text" else columns)
        document = dict(sent[seq])
        for name in without:
            row.pop(name, None)
            document.pop(name, None)
        misfits = json.loads(stored.get(layout.RESCUED) or "{}")
        for path, value in misfits.items():
            if keys_of(path)[0] in without:
                continue
            put_back(row, path, value)
            fitting = fits(at_path(types, path), at_path(sent[seq], path))
            assert not fitting or keys_of(path)[0] in allowed.changed, (seq, path, value, types)
        found, expected = ({} if one is None else one for one in (plain(row), plain(document)))
        assert found.keys() == expected.keys(), (seq, columns, misfits, sent[seq])
        for name, value in expected.items():
            assert same(found[name], value, form), (seq, name, found[name], value)
        before = read.rescued.setdefault(seq, misfits)
        read.doubtful.update(before.keys() ^ misfits.keys())
    assert read.rescued.keys() | history.refused == sent.keys()
    assert not any(read.rescued.values()) or history.conflict == "rescue"
    return read


# ---------------------------------------------------------------------- one type, or events


def kinds(type_: Any, path: Names) -> Iterator[tuple[Names, str]]:
    """A type of the file of types, and those inside it, by their paths of names in messages."""
    if isinstance(type_, dict):
        yield path, "struct"
        for name, inner in type_.items():
            yield from kinds(inner, (*path, name))
    elif isinstance(type_, list):
        yield path, "list"
        yield from kinds(type_[0], (*path, "[]"))
    elif type_ is not None:
        yield path, "int64" if type_ == "int53" else type_


def plain_type(type_: pa.DataType) -> Any:
    """A type of Arrow as the file has it."""
    if pa.types.is_struct(type_):
        return {field.name: plain_type(field.type) for field in type_}
    return [plain_type(type_.value_type)] if pa.types.is_list(type_) else str(type_).replace("[us, tz=UTC]", "")


def parsed(text: str) -> Any:
    """A type in an event, as the file has it."""
    out, ends = "", list[str]()
    for token in re.findall(r"struct<|list<|>|[,:] |[^<>,: ]+", text):
        ends += {"struct<": "}", "list<": "]"}.get(token, "")
        begin = {"struct<": "{", "list<": "[", ", ": ",", ": ": ":"}.get(token)
        out += begin or (ends.pop() if token == ">" else "null" if token == "null" else f'"{token}"')
    return json.loads(out)


def inexact(history: History, path: Names) -> bool:
    values = [at_path(document, ".".join(path)) for document in history.sent.values() if "[]" not in path]
    return any(isinstance(value, int) and abs(value) > EXACT for value in values)


class Kinds:
    """The types that columns may have, by path: those of the file of types, and those that events name."""

    def __init__(self, history: History) -> None:
        self.final = dict(kinds(history.types(), ()))
        self.logged: dict[Names, set[str]] = defaultdict(set)
        for event in history.events:
            for text in (event["was"], event["type"]):
                named = [*kinds(parsed(text), (event["column"],))]
                for path, kind in named if {kind for _, kind in named} - {"struct", "list"} else ():  # else no column
                    self.logged[path].add(kind)
        self.changed = {
            path[0] for path, some in self.logged.items() if not all(self.widens(path, one) for one in some)
        }
        """Columns that had another type, at some path, before replicas agreed."""
        if history.limit > 1:  # one has integers that are not exact in the double of another
            self.changed |= {
                path[0] for path, some in self.logged.items() if {"int64", "double"} <= some and inexact(history, path)
            }
        self.renamed: set[str] = set()
        if history.format == "parquet":
            self._add_renamed(history)
        self.changed |= self.renamed
        assert not (history.alone and self.changed), f"{self.changed} changed, without another replica"

    def _add_renamed(self, history: History) -> None:
        """Replicas that meet names which differ in case only in different orders differ in their first objects."""
        columns: dict[Names, set[Names]] = defaultdict(set)
        for schema in history.schemas():
            for path, _ in self.of(schema):
                columns[tuple(part.rstrip("_") for part in path)].add(path)
        renamed = {path[0].lower() for path, some in columns.items() if len(some) > 1}
        self.renamed |= {name for name in history.now if name.lower() in renamed}

    def widens(self, path: Names, kind: str) -> bool:
        """Whether a type is that of the file, or a narrower one."""
        final = self.final.get(path)
        return kind == final or (kind, final) == ("int64", "double")

    def check(self, schemas: Iterable[pa.Schema], table: pa.Schema) -> None:
        """A column has the type of the file in an object, a narrower one, or one that events name; and that of the
        file in the table of all objects, unless objects differ."""
        for schema in schemas:
            for column, kind in self.of(schema):
                path = tuple(part.rstrip("_") for part in column)
                assert self.widens(path, kind) or kind in self.logged[path], (path, kind, self.final, self.logged)
        for column, kind in self.of(table):
            path = tuple(part.rstrip("_") for part in column)
            assert kind == self.final.get(path) or path[0] in self.changed, (path, kind, self.final, self.logged)

    def of(self, schema: pa.Schema) -> Iterator[tuple[Names, str]]:
        for field in schema:
            if field.name not in OWN:
                yield from kinds(plain_type(field.type), (field.name,))
