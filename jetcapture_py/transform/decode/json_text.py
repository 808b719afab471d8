"""Read fields of JSON messages as the text that was sent, each from its own message.

For keys: the columns of a decoder that infers them depend on the messages before, and a key must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.decode.json_values import Reader, reader, struct_type

Sent = Sequence[msgspec.Raw | bytes | None]
"""JSON values as they were sent; None where there is none."""

_text = msgspec.json.Decoder(str).decode


class JsonTexts:
    """Reads the fields `names` of messages that are JSON objects.

    A string gives its value; a number, true and false the text that was sent; all else, and a field that is missing,
    null. A name is the field's own, in its case. One with dots is a path through objects, unless the message has a
    field that is called so. Of a repeated field the last one counts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        paths = [name.split(".") for name in names]
        self._message = _Object([*names, *(path[0] for path in paths)])
        self._inner = {step: _Object([step]) for path in paths for step in path[1:]}

    def __call__(self, batch: MessageBatch) -> Mapping[str, pa.StringArray]:
        """The texts of each field, one a message."""
        found = self._message.read(batch.column(layout.PAYLOAD).to_pylist())
        return {name: _texts(self._follow(name, found)) for name in self._names}

    def _follow(self, name: str, found: Mapping[str, Sent]) -> Sent:
        head, *steps = name.split(".")
        if not steps:
            return found[name]
        values = found[head]
        for step in steps:
            values = self._inner[step].read([each if _starts(each, b"{") else None for each in values])[step]
        return [inner if own is None else own for own, inner in zip(found[name], values, strict=True)]


class _Object:
    """Reads fields of JSON objects."""

    def __init__(self, names: Sequence[str]) -> None:
        fields = list(dict.fromkeys(names))
        self._decode: Callable[[msgspec.Raw | bytes], Any]
        readers: list[Reader]
        try:
            self._decode = msgspec.json.Decoder(struct_type([(name, msgspec.Raw) for name in fields])).decode
            readers = [reader(f"f{number}") for number in range(len(fields))]
        except ValueError:  # a name with a quote, a backslash or a control character
            self._decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
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


def _texts(values: Sent) -> pa.StringArray:
    sent = pa.array([None if each is None else bytes(each) for each in values], pa.binary()).dictionary_encode()
    texts = pa.array([_scalar(text) for text in sent.dictionary.to_pylist()], pa.string())  # most often, few
    return texts.take(sent.indices)


def _scalar(text: bytes) -> str | None:
    if text.startswith(b'"'):
        return _text(text)
    return None if text.startswith((b"{", b"[", b"null")) else text.decode()
