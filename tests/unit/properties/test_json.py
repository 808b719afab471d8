"""JSON with declared columns: each message gives what docs/formats.md says of it alone, whatever its neighbours are."""

from __future__ import annotations

import base64
import binascii
import contextlib
import datetime as dt
import json
import re
import struct
from decimal import Decimal, InvalidOperation
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import given

from jetcapture_py.archive import layout
from jetcapture_py.transform.decode.json_declared import ObjectDecoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from tests.support.batches import Declared, batch_of, outcomes

INTEGERS = {f"{sign}int{bits}": (sign, bits) for sign in ("", "u") for bits in (8, 16, 32, 64)}
UTC = dt.UTC
EPOCH = dt.datetime(1970, 1, 1, tzinfo=UTC)
ZONE = r"[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d"
MOMENT = re.compile(rf"(\d{{4}}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d+)?({ZONE})", re.ASCII)
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class MisfitError(Exception):
    """The value does not fit its declared type, so its message goes to the quarantine."""


class Number(str):
    """A number as it was written."""

    __slots__ = ()


def parsed(payload: bytes) -> Any:
    """The document; numbers as they were written. Of a repeated field the last one counts."""

    def constant(name: str) -> Any:
        raise ValueError(name)

    document = json.loads(payload.decode(), parse_int=Number, parse_float=Number, parse_constant=constant)
    json.dumps(document, ensure_ascii=False).encode()  # a lone surrogate is not UTF-8
    return document


def convert(kind: Any, value: Any) -> Any:
    """What a column of type `kind` (a name, or a tuple for a nested type) holds for the JSON value."""
    if value is None:
        return None
    if isinstance(kind, tuple):
        return nested(kind, value)
    if kind in INTEGERS:
        sign, bits = INTEGERS[kind]
        low, high = (0, 2**bits) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        require(type(value) is Number and re.fullmatch("-?[0-9]+", value) and low <= int(value) < high)
        return int(value)
    if kind in ("float32", "float64"):
        require(type(value) is Number)
        found = float(value)
        require(abs(found) != float("inf"))
        if kind == "float32":
            require(abs(found) <= 3.4028234663852886e38)
            found = struct.unpack("f", struct.pack("f", found))[0]
        return found
    if kind == "bool":
        require(type(value) is bool)
        return value
    if type(value) is not str and kind != "json" and not kind.startswith(("decimal", "epoch")):
        raise MisfitError
    return scalar(kind, value)


def scalar(kind: str, value: Any) -> Any:
    if kind == "string":
        return value
    if kind == "binary":
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise MisfitError from None
    if kind == "date":
        require(re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII))
        return fit(lambda: dt.date.fromisoformat(value))
    if kind == "timestamp":
        found = MOMENT.fullmatch(value)
        require(found)
        day, clock, fraction, zone = found.groups()  # type: ignore[union-attr]
        whole = fit(lambda: dt.datetime.fromisoformat(f"{day}T{clock}{zone.upper()}"))
        cut = int(((fraction or ".")[1:] + "000000")[:6])  # what is below a microsecond is cut off
        return fit(lambda: (whole + dt.timedelta(microseconds=cut)).astimezone(UTC))
    if kind.startswith("epoch"):
        return epoch(kind.removeprefix("epoch "), value)
    if kind.startswith("decimal"):
        require(type(value) in (str, Number) and NUMBER.fullmatch(value))
        precision, scale = map(int, re.findall(r"\d+", kind))
        number = Decimal(str(value))
        require(abs(number) < Decimal(10) ** (precision - scale))
        scaled = number.scaleb(scale)
        require(scaled == scaled.to_integral_value())
        return number
    raise AssertionError(kind)


def epoch(unit: str, value: Any) -> dt.datetime:
    """A number of units since 1970; fractions of seconds and milliseconds only."""
    require(type(value) is Number)
    whole = re.fullmatch("-?[0-9]+", value)
    require(whole or unit in ("s", "ms"))
    if whole:
        micros = int(value) // 1000 if unit == "ns" else int(value) * {"s": 10**6, "ms": 1000, "us": 1}[unit]
    else:
        micros = fit(lambda: round(float(value) * {"s": 10**6, "ms": 1000}[unit]))
    found: dt.datetime = fit(lambda: EPOCH + dt.timedelta(microseconds=micros))
    return found


def nested(kind: tuple[str, Any], value: Any) -> Any:
    what, inner = kind
    if what == "list":
        require(type(value) is list)
        return [convert(inner, item) for item in value]
    require(type(value) is dict)
    if what == "map":
        return [(name, convert(inner, item)) for name, item in value.items()]
    return {name: convert(of, value.get(name)) for name, of in inner}


def require(held: object) -> None:
    if not held:
        raise MisfitError


def fit(make: Any) -> Any:
    try:
        return make()
    except (ValueError, OverflowError, InvalidOperation):
        raise MisfitError from None


def reference(columns: dict[str, Any], payload: bytes) -> dict[str, Any] | None:
    """The row of one message; None when it goes to the quarantine."""
    try:
        document = parsed(payload)
        require(type(document) is dict)
        return {name: convert(kind, document.get(name)) for name, kind in columns.items()}
    except (MisfitError, ValueError, RecursionError):
        return None


plain_types = st.sampled_from([*INTEGERS, "float32", "float64", "bool", "string", "binary", "date", "timestamp"])
decimals = st.integers(1, 20).flatmap(lambda p: st.integers(0, p).map(lambda s: f"decimal({p},{s})"))
types = st.recursive(
    plain_types | decimals,
    lambda inner: (
        inner.map(lambda of: ("list", of))
        | inner.map(lambda of: ("map", of))
        | st.lists(st.tuples(st.sampled_from("abc"), inner), min_size=1, max_size=3, unique_by=lambda f: f[0]).map(
            lambda fields: ("struct", tuple(fields))
        )
    ),
    max_leaves=4,
)
epochs = st.sampled_from(["s", "ms", "us", "ns"]).map(lambda unit: f"epoch {unit}")


def text_of(kind: Any) -> str:
    """The type as a user writes it."""
    if isinstance(kind, str):
        return "timestamp" if kind.startswith("epoch") else kind
    what, inner = kind
    if what == "struct":
        return f"struct<{', '.join(f'{name}: {text_of(of)}' for name, of in inner)}>"
    return f"map<string, {text_of(inner)}>" if what == "map" else f"list<{text_of(inner)}>"


def declared(kind: Any) -> Declared:
    return Declared(text_of(kind), unit=kind[6:] if isinstance(kind, str) and kind.startswith("epoch") else None)


EDGES = [sign * 2**n + d for sign in (1, -1) for n in (7, 8, 15, 16, 31, 32, 53, 63, 64) for d in (-1, 0, 1)]
ODD_NUMBERS = ["1e3", "1E-2", "-0", "-0.0", "1.0", "0.1", "1e400", "1e39", "12345678901234567890.5", "0.005"]
numbers = st.one_of(
    st.integers(-300, 300),
    st.sampled_from(EDGES),
    st.integers(-(10**12), 10**12),
    st.decimals(-(10**6), 10**6, places=2, allow_nan=False).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda f: json.dumps(f)),
    st.sampled_from(ODD_NUMBERS),
)
moments = st.datetimes(timezones=st.sampled_from([UTC, dt.timezone(dt.timedelta(hours=-7))])).map(dt.datetime.isoformat)
ODD_TEXTS = ["2026-02-30", "0000-01-01", "2026-1-1", "2026-01-01T00:00:00", "2026-01-01T00:00:00.123456789Z"]
ODD_TEXTS += ["2026-01-01T24:00:00Z", "2026-01-01T00:00:60Z", "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"]
ODD_TEXTS += ["2026-01-01T00:00:00+24:00", "1.50", "-7", "1e2", "+1", "0x1", " 1", "YQ", "YQ==", "Y Q==", "true"]
texts = st.one_of(
    st.text(max_size=6),
    st.binary(max_size=6).map(lambda data: base64.b64encode(data).decode()),
    st.dates().map(str),
    moments,
    moments.map(lambda text: text.replace("T", " ").lower()),
    st.sampled_from(ODD_TEXTS),
)


def values(kind: Any) -> st.SearchStrategy[str]:
    """JSON texts for a type: mostly ones that fit, or nearly."""
    anything = st.one_of(
        st.sampled_from(["null", "true", "false", "{}", "[]", "[1]", '{"a": 1}', '"x"']),
        numbers.map(str),
        texts.map(json.dumps),
    )
    if isinstance(kind, tuple):
        what, inner = kind
        if what == "list":
            items = st.lists(values(inner), max_size=3)
            return st.one_of(items.map(lambda found: f"[{', '.join(found)}]"), anything)
        if what == "map":
            keys = st.sampled_from(["k", "l", "é", ""])
            pairs = st.lists(st.tuples(keys, values(inner)), max_size=3, unique_by=lambda pair: pair[0])
            return st.one_of(pairs.map(object_text), anything)
        fields = st.tuples(*(st.tuples(st.just(name), values(of)) for name, of in inner))
        return st.one_of(fields.map(object_text), fields.map(lambda found: object_text(found[1:])), anything)
    if kind == "bool":
        return st.one_of(st.sampled_from(["true", "false", "null"]), anything)
    likely = texts.map(json.dumps) if kind in ("string", "binary", "date", "timestamp") else numbers.map(str)
    return st.one_of(likely, likely, anything)


def object_text(pairs: Any) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs) + "}"


DEEP = 200_000
"""Levels that no Python decodes; 3.13 decodes 9,000."""
BROKEN = [b"", b"{", b'{"a":', b"1}", b"[]", b"null", b"\0", b" \n", b"/*", b"*/ {}", b'{"a": 1},', b'{"z": "\n"}']
BROKEN += [b'{"a": 1},{"a": 2}', b'{"z": "\\ud800"}', b'{"z": "\xff"}']
BROKEN += [b'{"a": 1}{"a": 2}', b'{"a": 1}\n{"a": 2}', b'{"a": [1', b"1], [2", b"2]}", b'{"z": "', b'"}', b'{"z": NaN}']
BROKEN += [b'{"z": %b' % (b"[" * DEEP), b'{"z": %b%b}' % (b"[" * DEEP, b"]" * DEEP)]
"""Not one is an object in JSON, though some would be with what comes before or after them."""


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Any], list[bytes]]:
    """Columns `a`, `b`…, and payloads: objects with these fields and others, some of them damaged."""
    kinds = draw(st.lists(types | epochs, min_size=1, max_size=3))
    columns = dict(zip("abc", kinds, strict=False))
    payloads = []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.integers(0, 5)) == 0:
            payloads.append(draw(st.sampled_from(BROKEN)))
            continue
        fields = [(name, draw(values(kind))) for name, kind in columns.items() if draw(st.integers(0, 4))]
        fields += draw(st.lists(st.tuples(st.sampled_from(["z", "a", "A", "é"]), values("string")), max_size=2))
        payloads.append(object_text(fields).encode(errors="surrogatepass"))
    return columns, payloads


def same(found: Any, expected: Any) -> bool:
    """Equal, and of the same sort: True is not 1 here; -0.0 may be 0.0."""
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and found.keys() == expected.keys()
        return alike and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


@given(batches())
def test_each_message_gives_what_its_own_bytes_say(case: tuple[dict[str, Any], list[bytes]]) -> None:
    columns, payloads = case
    decoder = ObjectDecoder({name: declared(kind) for name, kind in columns.items()})
    expected = [reference(columns, payload) for payload in payloads]
    together = decoder.decode(batch_of(payloads))
    together.fields.validate(full=True)
    found = outcomes(together, len(payloads))
    for payload, row, wanted in zip(payloads, found, expected, strict=True):
        # of a repeated field the last one counts, but the others must be of its type, too
        assert same(row, wanted) or (row is None and repeats(payload, columns)), payload
        assert same(outcomes(decoder.decode(batch_of([payload])), 1), [row]), payload


KINDS = [*INTEGERS, "float32", "float64", "bool", "string", "binary", "date", "timestamp", "decimal(3,0)"]
KINDS += ["decimal(5,2)", "decimal(20,0)", "decimal(38,3)", "epoch s", "epoch ms", "epoch us", "epoch ns"]


def test_every_notable_value_by_every_type() -> None:
    for kind in KINDS:
        plain = ["null", "true", "false", "{}", "[]", *map(str, EDGES), *ODD_NUMBERS]
        payloads = [b'{"a": %b}' % text.encode() for text in (*plain, *map(json.dumps, (*ODD_TEXTS, *plain)))]
        found = outcomes(ObjectDecoder({"a": declared(kind)}).decode(batch_of(payloads)), len(payloads))
        for payload, row in zip(payloads, found, strict=True):
            assert same(row, reference({"a": kind}, payload)), payload


def repeats(payload: bytes, columns: dict[str, Any]) -> bool:
    """Whether a declared field is there more than once."""
    names: list[str] = []
    with contextlib.suppress(ValueError):
        pairs = json.loads(payload, object_pairs_hook=lambda pairs: pairs)
        names = [name for name, _ in pairs if name in columns] if isinstance(pairs, list) else []
    return len(names) > len(set(names))


scalars = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(-1e9, 1e9) | st.text("ab1", max_size=3)
documents = st.dictionaries(
    st.sampled_from(["a", "b", "B", "key", "_nats_seq", "c d"]),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyX"), inner)),
    max_size=4,
)


@given(st.lists(documents, min_size=1, max_size=5), st.lists(st.sampled_from(BROKEN), max_size=3), st.randoms())
def test_broken_neighbours_change_no_inferred_row(sent: list[dict[str, Any]], broken: list[bytes], chance: Any) -> None:
    good = [json.dumps(document).encode() for document in sent]
    mixed = [(payload, True) for payload in good] + [(payload, False) for payload in broken]
    chance.shuffle(mixed)
    alone = InferringDecoder(conflict="widen").decode(batch_of([payload for payload, fine in mixed if fine]))
    beside = InferringDecoder(conflict="widen").decode(batch_of([payload for payload, _ in mixed]))
    rows = outcomes(beside, len(mixed))
    assert [row for row, (_, fine) in zip(rows, mixed, strict=True) if fine] == outcomes(alone, len(good))
    assert [row for row, (_, fine) in zip(rows, mixed, strict=True) if not fine] == [None] * len(broken)
    assert beside.fields.schema == alone.fields.schema


flat = st.dictionaries(st.sampled_from(["a", "b", "key", "_nats_seq", "c d"]), scalars, max_size=4)


def widened(value: Any, to: pa.DataType) -> Any:
    """The value as a column of that type holds it, or holds it later."""
    if value is None or to is None:
        return None
    if pa.types.is_string(to):
        return value if isinstance(value, str) else json.dumps(value)
    return float(value) if pa.types.is_floating(to) else value


@given(st.lists(flat, min_size=1, max_size=4), st.lists(flat, max_size=3))
def test_what_came_before_widens_a_row_and_no_more(batch: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    decoder = InferringDecoder(conflict="widen")
    decoder.decode(batch_of([json.dumps(document).encode() for document in before]))
    decoded = decoder.decode(batch_of([json.dumps(document).encode() for document in batch]))
    fields = decoded.fields
    seen = {name for document in (*before, *batch) for name, value in document.items() if value is not None}
    assert decoded.columns is not None
    assert set(decoded.columns.names) == {layout.field_name(name) for name in seen}
    here = {name for document in batch for name, value in document.items() if value is not None}
    assert set(fields.schema.names) == {layout.field_name(name) for name in here}
    for name in here:
        kinds = {type(doc[name]) for doc in (*before, *batch) if doc.get(name) is not None}
        huge = any(type(doc.get(name)) is int and abs(doc[name]) > 2**53 for doc in (*before, *batch))
        of = fields.schema.field(layout.field_name(name)).type
        if kinds in ({int}, {int, float}, {float}):
            assert of == (pa.int64() if kinds == {int} and not huge else pa.float64()) or huge
        else:
            assert of == (pa.bool_() if kinds == {bool} else pa.string())
        found = fields.column(layout.field_name(name)).to_pylist()
        for document, value in zip(batch, found, strict=True):
            expected = widened(document.get(name), of)
            if isinstance(value, str) and isinstance(expected, str) and not isinstance(document[name], str):
                assert json.loads(value) == document[name]
            else:
                assert same(value, expected), (name, document)
