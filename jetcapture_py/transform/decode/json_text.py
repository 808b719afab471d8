"""Read fields of JSON and MessagePack messages as text, each from its own message.

For keys: the columns of a decoder that infers them depend on the messages before, and a key must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.decode.json_declared import Reader, reader, struct_type

Sent = Sequence[msgspec.Raw | bytes | None]
"""JSON values as they were sent; None where there is none."""

_text = msgspec.json.Decoder(str).decode


class JsonTexts:
    """Reads the fields `names` of messages that are JSON objects.

    A string gives its value; a number, true and false the text that was sent; all else, and a field that is missing,
    null. A name is the field's own, in its case. One with dots is a path through objects, unless the message has a
    field that is called so. Of a repeated field the last one counts.
    """

    _make: Callable[[Any], Callable[[Any], Any]] = staticmethod(lambda of: msgspec.json.Decoder(of).decode)
    """Returns what decodes a payload as a msgspec type."""

    def __init__(self, names: Sequence[str], unpack: Callable[[MessageBatch], MessageBatch] | None = None) -> None:
        self._names, self._unpack = names, unpack
        paths = [name.split(".") for name in names]
        self._message = _Object([*names, *(path[0] for path in paths)], self._make)
        self._inner = {step: _Object([step], self._make) for path in paths for step in path[1:]}

    def __call__(self, batch: MessageBatch) -> Mapping[str, pa.StringArray]:
        """The texts of each field, one a message; of a message with several rows, those of the first."""
        batch = batch if self._unpack is None else self._unpack(batch)
        found = self._message.read(batch.column(layout.PAYLOAD).to_pylist())
        return {name: self._texts(self._follow(name, found)) for name in self._names}

    def _follow(self, name: str, found: Mapping[str, Sent]) -> Sent:
        head, *steps = name.split(".")
        if not steps:
            return found[name]
        values = found[head]
        for step in steps:
            values = self._inner[step].read([each if self._is_object(each) else None for each in values])[step]
        return [inner if own is None else own for own, inner in zip(found[name], values, strict=True)]

    def _is_object(self, value: msgspec.Raw | bytes | None) -> bool:
        return _starts(value, b"{")

    def _texts(self, values: Sent) -> pa.StringArray:
        return _texts(values, _scalar)


class MsgpackTexts(JsonTexts):
    """The same for messages that are MessagePack maps. A number gives its shortest text."""

    _make = staticmethod(lambda of: msgspec.msgpack.Decoder(of).decode)

    def _is_object(self, value: msgspec.Raw | bytes | None) -> bool:
        if value is None:
            return False
        first = memoryview(value)[0]
        return first >> 4 == 0x8 or first in (0xDE, 0xDF)

    def _texts(self, values: Sent) -> pa.StringArray:
        return _texts(values, _msgpack_scalar)


class MsgpackTimes(MsgpackTexts):
    """The same, and a timestamp gives RFC 3339 text."""

    def _texts(self, values: Sent) -> pa.StringArray:
        return _texts(values, _msgpack_time)


class _Object:
    """Reads fields of JSON objects."""

    def __init__(self, names: Sequence[str], make: Callable[[Any], Callable[[Any], Any]]) -> None:
        fields = list(dict.fromkeys(names))
        self._decode: Callable[[msgspec.Raw | bytes], Any]
        readers: list[Reader]
        try:
            self._decode = make(struct_type([(name, msgspec.Raw) for name in fields]))
            readers = [reader(f"f{number}") for number in range(len(fields))]
        except ValueError:  # a name with a quote, a backslash or a control character
            self._decode = make(dict[str, msgspec.Raw])
            readers = [_item(name) for name in fields]
        self._readers = dict(zip(fields, readers, strict=True))

    def read(self, objects: Sent) -> dict[str, Sent]:
        """The values of each field."""
        rows = [None if each is None else self._decode(each) for each in objects]
        return {name: read(rows) for name, read in self._readers.items()}


def _item(name: str) -> Reader:
    return lambda rows: [None if row is None else row.get(name) for row in rows]


def _starts(value: msgspec.Raw | bytes | None, character: bytes) -> bool:
    return value is not None and bytes(memoryview(value)[:1]) == character


def _texts(values: Sent, scalar: Callable[[bytes], str | None]) -> pa.StringArray:
    sent = pa.array([None if each is None else bytes(each) for each in values], pa.binary()).dictionary_encode()
    texts = pa.array([scalar(text) for text in sent.dictionary.to_pylist()], pa.string())  # most often, few
    return texts.take(sent.indices)


def _scalar(text: bytes) -> str | None:
    if text.startswith(b'"'):
        return _text(text)
    return None if text.startswith((b"{", b"[", b"null")) else text.decode()


def _msgpack_scalar(data: bytes) -> str | None:
    value = msgspec.msgpack.decode(data)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _msgpack_time(data: bytes) -> str | None:
    value = msgspec.msgpack.decode(data)
    return value.isoformat() if isinstance(value, datetime) else _msgpack_scalar(data)
