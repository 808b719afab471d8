"""Decode the entries of a KV bucket (ADR-8): key, operation, revision, and the columns of the value.

Deletions and markers have no value. They are not decoded, and the value's columns are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.config.buckets import COLUMNS, OPERATIONS, PUT, REASONS
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch, decode_checked
from jetcapture_py.transform.keys import header_values

_KEY = r"^\$KV\.[^.]+\."


class BucketDecoder:
    """Decodes values with another decoder, and adds the columns of the bucket."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`; BatchTooWideError as by the decoder of values."""
        operations = operations_of(batch)
        values = pc.equal(operations, PUT).to_numpy(zero_copy_only=False)
        puts, others = np.flatnonzero(values), np.flatnonzero(~values)
        part = MessageBatch(stream=batch.stream, rows=batch.rows.take(pa.array(puts))) if len(others) else batch
        found = decode_checked(self.decoder, part)
        rows = puts if found.messages is None else puts[found.messages.to_numpy()]
        sources = np.concatenate([rows, others])
        order = np.argsort(sources, kind="stable")
        sources = sources[order]
        whole = len(sources) == len(batch) and not found.failures and bool((np.diff(sources) == 1).all())
        columns = {
            "key_name": _keys(batch.column(layout.SUBJECT)),
            "operation": operations,
            "revision": batch.column(layout.SEQ),
        }
        if not whole:
            columns = {name: column.take(pa.array(sources)) for name, column in columns.items()}
        if found.fields.num_columns:
            fields = found.fields
            if len(others):
                fields = fields.take(pa.array(order, mask=order >= len(rows)))
            columns |= dict(zip(map(column_name, fields.schema.names), fields.columns, strict=True))
        return Decoded(
            fields=pa.RecordBatch.from_pydict(columns),
            messages=None if whole else pa.array(sources, pa.int32()),
            failures=tuple(replace(each, index=int(puts[each.index])) for each in found.failures),
            columns=None if found.columns is None else _renamed(found.columns),
        )


def operations_of(batch: MessageBatch) -> pa.StringArray:
    """Return what each message does: put, delete, purge or expire."""
    headers = batch.column(layout.HEADERS)
    if headers.null_count == len(headers):
        return pa.array([PUT] * len(headers), pa.string())
    told, reason = (header_values(headers, name) for name in ("KV-Operation", "Nats-Marker-Reason"))
    unmarked = pc.equal(pc.coalesce(told, ""), "")
    found = pc.if_else(unmarked, _looked_up(reason, REASONS), _looked_up(told, OPERATIONS))
    return pc.coalesce(found, PUT)


def _looked_up(texts: pa.StringArray, meanings: Mapping[str, str]) -> pa.StringArray:
    """Return the meaning of each text; null for others."""
    at = pc.index_in(texts, pa.array(list(meanings), pa.string()))
    return pa.array(list(meanings.values()), pa.string()).take(at)


def _keys(subjects: pa.StringArray) -> pa.StringArray:
    """Return the keys in subjects; null for subjects that are not a bucket's."""
    ours = pc.match_substring_regex(subjects, _KEY + ".")
    keys = pc.replace_substring_regex(subjects, _KEY, "", max_replacements=1)
    return pc.if_else(ours, keys, pa.scalar(None, pa.string()))


def column_name(name: str) -> str:
    """Return the column of a value's field: fields that are called like columns of the bucket get `_` appended."""
    return f"{name}_" if name.lower().rstrip("_") in COLUMNS else name


def _renamed(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_name(column_name(field.name)) for field in schema])
