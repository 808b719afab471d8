"""Read fields of JSON and MessagePack messages as text, each from its own message.

For keys: inferred columns depend on earlier messages, and a key must not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.transform.batch import MessageBatch
from jetcapture_py.transform.decode.bounds import ObjectFormat
from jetcapture_py.transform.decode.common import REFUSALS, Read, without_mark
from jetcapture_py.transform.decode.json_declared import reader, struct_type

Sent = Sequence[msgspec.Raw | bytes | None]
"""Values as sent; None if missing."""


class PayloadTexts:
    """Reads the fields `names` of messages that are objects.

    A string gives its value; a number, true and false give the text sent (in MessagePack, a number's shortest text);
    anything else and a missing field give null. Names are case-sensitive. A name with dots is a path through objects,
    unless the message has a field of that name. Of a repeated field the last one counts. With `times`, timestamps of
    MessagePack give RFC 3339 text.
    """

    def __init__(
        self,
        names: Sequence[str],
        reading: ObjectFormat,
        unpack: Callable[[MessageBatch], MessageBatch] | None = None,
        *,
        times: bool = False,
    ) -> None:
        self._names, self._format, self._unpack, self._times = names, reading, unpack, times
        paths = [name.split(".") for name in names]
        self._message = _fields(list(dict.fromkeys([*names, *(path[0] for path in paths)])), reading)
        self._inner = {step: _fields([step], reading) for path in paths for step in path[1:]}

    def __call__(self, batch: MessageBatch) -> Mapping[str, pa.StringArray]:
        """Return the texts of each field, one per message; of a message with several rows, the first row's."""
        batch = batch if self._unpack is None else self._unpack(batch)
        fields = self._message(without_mark(batch.column(layout.PAYLOAD)).to_pylist())
        return {name: self._texts(self._follow(name, fields)) for name in self._names}

    def _follow(self, name: str, fields: Mapping[str, Sent]) -> Sent:
        head, *steps = name.split(".")
        if not steps:
            return fields[name]
        values = fields[head]
        for step in steps:
            values = self._inner[step](values)[step]
        return [inner if text is None else text for text, inner in zip(fields[name], values, strict=True)]

    def _texts(self, values: Sent) -> pa.StringArray:
        sent = pa.array([None if value is None else bytes(value) for value in values], pa.binary()).dictionary_encode()
        texts = [self._format.text(value, self._times) for value in sent.dictionary.to_pylist()]  # usually few
        return pa.array(texts, pa.string()).take(sent.indices)


def _fields(names: Sequence[str], reading: ObjectFormat) -> Callable[[Sent], dict[str, Sent]]:
    """Return a reader of these fields of objects; a payload that is no object, such as a deletion's, has none."""
    readers: list[Read]
    try:
        type_: Any = struct_type([(name, msgspec.Raw) for name in names])
        readers = [reader(f"f{number}") for number in range(len(names))]
    except ValueError:  # a name with a quote, a backslash or a control character
        type_ = dict[str, msgspec.Raw]
        readers = [_item(name) for name in names]
    decode = reading.decoder(type_).decode

    def decoded(value: msgspec.Raw | bytes | None) -> Any:
        try:
            return decode(value) if value else None
        except REFUSALS:
            return None

    def read(objects: Sent) -> dict[str, Sent]:
        rows = list(map(decoded, objects))
        return {name: field(rows) for name, field in zip(names, readers, strict=True)}

    return read


def _item(name: str) -> Read:
    return lambda rows: [None if row is None else row.get(name) for row in rows]
