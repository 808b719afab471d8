"""A key is a function of its own message: neither its neighbours nor those that came before it can change it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from hypothesis import example, given

from jetcapture_py.archive import layout
from jetcapture_py.jetstream.wire.inbox import Received
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch
from jetcapture_py.transform.decode import RawDecoder
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from jetcapture_py.transform.keys import KeyFunction, make_key
from jetcapture_py.transform.prepare import Prepared, Preparer
from tests.support.batches import decode_settings
from tests.unit.properties.test_json import parsed


def field(message: dict[str, Any], name: str) -> str | None:
    """The text of a field as it was sent; None where it is not a string, a number, true or false."""
    value: Any = message
    for step in [name] if name in message else name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str) else None


def expected(template: Sequence[str], payload: bytes) -> str | None:
    """The key by the documentation: `{name}` is a field, everything else is text."""
    texts = [field(parsed(payload), part[1:-1]) if part.startswith("{") else part for part in template]
    return None if None in texts else "".join(text for text in texts if text is not None) or None


names = st.sampled_from(["id", "ID", "Id", "a", "b", "a.b", "key", "key_", "Key", "date", "_nats_seq", "ü"])
scalars = st.sampled_from(
    [
        *("1", "1.0", "1.00", "1e0", "-0", "0", "-0.0", "12345678901", "1.2345678901e+10", "0.1", "1E5"),
        *("9223372036854775808", "18446744073709551616", "123456789012345678901234567890"),
        *('"1"', '"1.0"', '"eu"', r'"\u0065u"', '"ü"', '""', '"true"', '"null"', r'"a\n/\"b"'),
        *("true", "false", "null"),
    ]
)


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects as text; fields may be repeated."""
    fields = st.tuples(names, values).map(lambda field: f"{json.dumps(field[0])} :{field[1]}")
    escaped = fields.map(lambda text: text.replace('"id"', r'"\u0069d"'))
    return st.lists(fields | escaped, max_size=4).map(lambda each: "{" + " ,".join(each) + "}")


values = st.recursive(
    scalars,
    lambda inner: objects(inner) | st.lists(inner, max_size=2).map(lambda each: f"[{','.join(each)}]"),
    max_leaves=5,
)
payloads = objects(values).map(str.encode)
single = [(f"{{{name}}}",) for name in ("id", "ID", "key", "key_", "ü", "a.b", "a.b.id", "_nats_seq")]
templates = st.sampled_from([*single, ("{date}", "-", "{a.b}"), ("x-", "{id}", "/", "{Id}")])


@dataclass
class Alone:
    """A decoder that raises for more than one message, so that each is decoded for itself."""

    inner: Decoder

    def decode(self, batch: MessageBatch) -> Decoded:
        if len(batch) > 1:
            raise RuntimeError("too many")
        return self.inner.decode(batch)


def keys_of(prepared: Prepared) -> dict[int, str | None]:
    """The key of each message by its sequence."""
    found: dict[int, str | None] = {}
    for run in prepared.runs:
        seqs = prepared.rows.slice(run.start, run.length).column(layout.SEQ).to_pylist()
        found.update(dict.fromkeys(seqs, run.key))
    return found


def prepare(preparer: Preparer, messages: Sequence[tuple[int, bytes]]) -> dict[int, str | None]:
    replies = [b"$JS.ACK.S.C.1.%d.1.1000000000.0" % seq for seq, _ in messages]
    count = len(messages)
    return keys_of(preparer(Received.of([b"s"] * count, replies, [b""] * count, [payload for _, payload in messages])))


def preparer(decoder: Decoder, key: KeyFunction) -> Preparer:
    return Preparer(stream="S", consumer="C", decoder=decoder, key=key, interval=900, keep_payload=True)


def ways(
    decoder: Callable[[], Decoder], key: KeyFunction, messages: list[bytes], before: list[bytes], chance: random.Random
) -> list[dict[int, str | None]]:
    """The keys of `messages`, by number from 1, as they come out in different histories and company."""
    numbered = list(enumerate(messages, 1))
    found = [prepare(preparer(decoder(), key), numbered), prepare(preparer(Alone(decoder()), key), numbered)]
    for _ in range(3):
        warm = preparer(decoder(), key)
        prepare(warm, [(1000, payload) for payload in before])
        chance.shuffle(numbered)
        keys: dict[int, str | None] = {}
        rest = numbered
        while rest:
            size = chance.randint(1, len(rest))
            neighbours = [(1000, payload) for payload in before[: chance.randint(0, len(before))]]
            keys.update(prepare(warm, [*neighbours, *rest[:size]]))
            rest = rest[size:]
        keys.pop(1000, None)
        found.append(keys)
    return found


INFERRED = decode_settings(format="json", columns={})


@given(
    templates,
    st.lists(payloads, min_size=1, max_size=6),
    st.lists(payloads, max_size=4),
    st.integers(0, 1 << 32).map(random.Random),
)
@example(("{id}",), [b'{"id":12345678901}'], [b'{"id":0.5}'], random.Random(1))
@example(("{id}",), [b'{"id":1.0}', b'{"id":1}'], [b'{"id":"x"}'], random.Random(1))
@example(("{id}",), [b'{"id":1}'], [b'{"ID":1}'], random.Random(1))
@example(("{a.b}",), [b'{"a":{"b":1}}'], [b'{"a.b":2}'], random.Random(1))
@example(("{a.b}",), [b'{"a.b":null,"a":{"b":1}}', b'{"a":[1]}', b'{"a":"{"}'], [], random.Random(1))
def test_a_key_of_fields_that_nobody_declared_is_the_text_that_the_message_has_there(
    template: tuple[str, ...], messages: list[bytes], before: list[bytes], chance: random.Random
) -> None:
    key = make_key("".join(template), INFERRED)
    for keys in ways(InferringDecoder, key, messages, before, chance):
        for number, found in keys.items():
            assert found == expected(template, messages[number - 1]), messages[number - 1]


@given(st.lists(st.none() | st.text(st.characters(codec=None), max_size=90), min_size=1, max_size=8))
@example(["a", "\ud800", "b"])
@example(["\udfff" * 3, "x" * 300, "..", None])
def test_only_the_messages_whose_key_cannot_be_a_directory_are_quarantined(wanted: list[str | None]) -> None:
    def own(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        return pa.array([wanted[int(payload)] for payload in batch.column(layout.PAYLOAD).to_pylist()], pa.string())

    numbered = [(number, b"%d" % (number - 1)) for number in range(1, len(wanted) + 1)]
    found = prepare(preparer(RawDecoder(), own), numbered)

    def fits(key: str | None) -> bool:
        try:
            return len(layout.escape_key(key).encode()) <= layout.MAX_KEY_BYTES
        except UnicodeEncodeError:
            return False

    assert found == {number: key or None for number, key in enumerate(wanted, 1) if fits(key)}
