"""Compute a message's key from a template and its bucket from its timestamp, vectorized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int64s
from jetcapture_py.archive.bundles import bundle_numbers, bundle_text
from jetcapture_py.config.template import STREAM, TemplatePart, parse_template
from jetcapture_py.transform.batch import MessageBatch, header_values

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import DecodeConfig


class KeyFunction(Protocol):
    """Computes the key of each message.

    Obligations: depends on the message alone and is always the same for the same message, because deduplication relies
    on it; null or "" means no key. Types and names of inferred columns depend on earlier messages, so do not use them
    for a key: read the payload. Called from a worker thread with a batch and its decoded fields, aligned by row;
    returns a string array of the same length. If it raises or returns anything else, it is called again for each
    message alone, and failing messages go to the quarantine.
    """

    def __call__(self, batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        """Return the key of every row."""
        ...


def make_key(text: str, decode: DecodeConfig | None = None, own: Collection[str] = ()) -> KeyFunction:
    """Return the key function of a template, or the one named by `package.module:function`. Raises ValueError.

    `decode` configures the decoder. If its columns depend on earlier messages, a template reads fields from the
    message's own payload, except those in `own`, which do not come from payloads.
    """
    if not plugins.is_reference(text):
        return TemplateKey(text, decode, (*own, str(STREAM.value)))
    function = plugins.load(text)
    if not callable(function):
        raise ValueError(f"{text} is not a function")
    return cast("KeyFunction", function)


FieldTexts = Callable[[MessageBatch], Mapping[str, pa.StringArray]]
"""Reads fields from payloads."""


def payload_texts(decode: DecodeConfig | None, names: Sequence[str], *, times: bool = False) -> FieldTexts | None:
    """Return a reader of the fields `names`; None if decoded columns do not depend on other messages.

    With `times`, timestamps of MessagePack give RFC 3339 text; else they are null, as in keys.
    """
    if not names or decode is None or decode.columns or decode.known is None or not decode.known.infers:
        return None
    from jetcapture_py.transform.decode import (
        json_text,
        make_unpacker,
        module_of,
    )  # imported only if payloads are read

    unpack = make_unpacker(decode)
    reading = module_of(decode.known).OBJECT_FORMAT
    return json_text.PayloadTexts(names, reading, None if unpack is None else unpack.first, times=times)


class TemplateKey:
    """A key template as a `KeyFunction`. A missing part (token, header, field, null) means no key.

    Fields are decoded columns, or read from payloads (see `payload_texts`); those in `own` are always columns.
    """

    def __init__(self, template: str, decode: DecodeConfig | None = None, own: Collection[str] = ()) -> None:
        self.parts = parse_template(template)
        names = [name for part in self.parts if part.kind == "field" and (name := str(part.value)) not in own]
        self._texts = payload_texts(decode, names)

    def __call__(self, batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:
        """Return the key of every row."""
        texts = None if self._texts is None else self._texts(batch)
        columns = [_column(part, batch, fields, texts) for part in self.parts]
        if not columns:
            return pa.nulls(len(batch), pa.string())
        if all(isinstance(column, str) for column in columns):
            return pa.array(["".join(columns)] * len(batch), pa.string())
        if len(columns) == 1:
            return columns[0]
        return pc.binary_join_element_wise(*columns, "", null_handling="emit_null")


def _column(
    part: TemplatePart, batch: MessageBatch, fields: pa.RecordBatch, texts: Mapping[str, pa.StringArray] | None
) -> pa.StringArray | str:
    if part.kind == "text":
        return str(part.value)
    if part == STREAM and batch.stream:
        return batch.stream
    if part.kind == "subject":
        return batch.column(layout.SUBJECT)
    if part.kind == "token":
        subjects = batch.column(layout.SUBJECT).dictionary_encode()  # usually few distinct values
        return _token(subjects.dictionary, int(part.value)).take(subjects.indices)
    if part.kind == "header":
        return header_values(batch.column(layout.HEADERS), str(part.value))
    name = str(part.value)
    if texts is not None and name in texts:
        return texts[name]
    column = field_column(fields, name)
    if column is None or pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
        return pa.nulls(len(batch), pa.string())  # Arrow counts no rows without decoded columns
    return column.cast(pa.string())


def _token(subjects: pa.StringArray, number: int) -> pa.StringArray:
    tokens = pc.split_pattern(subjects, ".")
    offsets = tokens.offsets.to_numpy()
    index = offsets[:-1] + number
    missing = index >= offsets[1:]
    return tokens.values.take(pa.array(np.where(missing, 0, index), mask=missing))


def field_column(fields: pa.RecordBatch, path: str) -> pa.Array | None:
    """Find a decoded field by its column name, or by a path through structs; return None without one."""
    for name in (path, layout.field_name(path)):
        if name in fields.schema.names:
            return fields.column(name)
    head, *rest = path.split(".")
    name = layout.field_name(head)
    column = fields.column(name) if rest and name in fields.schema.names else None
    for step in rest:
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(step) < 0:
            return None
        column = pc.struct_field(column, step)
    return column


def buckets(timestamps: pa.Array, interval: int) -> Int64s:
    """Return the start of each message's interval as int64 seconds since the epoch; `interval` is in seconds."""
    seconds: Int64s = timestamps.cast(pa.int64()).to_numpy(zero_copy_only=False) // 1_000_000
    return seconds - seconds % interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive rows of one (key, bucket) or (bundle, bucket): `start` and `length` count rows.

    `bundle` is as in `BlockId`; with it, `key` is None.
    """

    key: str | None
    bucket: int
    start: int
    length: int
    bundle: str = ""


def without_empty(keys: pa.StringArray) -> pa.StringArray:
    """Replace "" by null, because it counts as none."""
    return pc.if_else(pc.equal(keys, ""), pa.scalar(None, pa.string()), keys)


def group(
    rows: pa.RecordBatch, keys: pa.StringArray, starts: Int64s, bundles: int = 0
) -> tuple[pa.RecordBatch, Sequence[Run]]:
    """Group rows by (key, bucket), stable, and return each group's position.

    `keys` and `starts` (from `buckets`) have one entry per row. "" counts as no key. With `bundles`, rows are grouped
    by (bundle, bucket), without a Python object per key.
    """
    if not rows.num_rows:
        return rows, ()
    encoded = keys.dictionary_encode(null_encoding="encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    if bundles:
        numbers, codes = np.unique(bundle_numbers(encoded.dictionary, bundles)[codes], return_inverse=True)
        names = [bundle_text(number, bundles) for number in numbers.tolist()]
    else:
        names = encoded.dictionary.to_pylist()
        if "" in names:
            return group(rows, without_empty(keys), starts)
    one = (starts == starts[0]).all()
    bucket_values, bucket_codes = (starts[:1], 0) if one else np.unique(starts, return_inverse=True)
    codes = codes.astype(np.int64) * len(bucket_values) + bucket_codes
    codes = codes.astype(np.min_scalar_type(len(names) * len(bucket_values)))
    if (codes[1:] < codes[:-1]).any():
        order = np.argsort(codes, kind="stable")  # a radix sort of small integers
        codes = codes[order]
        rows = rows.take(pa.array(order))
    edges = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    runs = []
    for start, stop in pairwise([*edges, len(codes)]):
        name, bucket = divmod(int(codes[start]), len(bucket_values))
        key, bundle = (None, names[name]) if bundles else (names[name], "")
        runs.append(Run(key=key, bundle=bundle, bucket=int(bucket_values[bucket]), start=start, length=stop - start))
    return rows, runs
