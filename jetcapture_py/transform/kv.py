"""Decode the entries of a KV bucket (ADR-8)."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py.archive import layout
from jetcapture_py.config.buckets import COLUMNS, MARKER, OPERATION, OPERATIONS, PUT, REASONS, SUBJECTS
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch, decode_some, header_values


class BucketDecoder:
    """Decodes the entries of a KV bucket (ADR-8): key, operation, revision, and the columns of another decoder.

    Deletions and markers have no value: they are not decoded, and the value's columns are null.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`; BatchTooWideError as by the decoder of values."""
        operations = operations_of(batch.column(layout.HEADERS))
        values = pc.equal(operations, PUT).to_numpy(zero_copy_only=False)
        decoded = decode_some(self.decoder, batch, values)
        messages = decoded.messages
        subjects = batch.column(layout.SUBJECT)
        keys = pc.replace_substring_regex(subjects, SUBJECTS, "", max_replacements=1)
        keys = pc.if_else(pc.match_substring_regex(subjects, SUBJECTS + "."), keys, pa.scalar(None, pa.string()))
        columns = {"key_name": keys, "operation": operations, "revision": batch.column(layout.SEQ)}
        if messages is not None:
            columns = {name: column.take(messages) for name, column in columns.items()}
        fields = decoded.fields
        columns |= dict(zip(map(_column_name, fields.schema.names), fields.columns, strict=True))
        return Decoded(
            fields=pa.RecordBatch.from_pydict(columns),
            messages=messages,
            failures=decoded.failures,
            columns=decoded.columns
            and pa.schema([field.with_name(_column_name(field.name)) for field in decoded.columns]),
        )


def operations_of(headers: pa.MapArray) -> pa.StringArray:
    """Return each message's operation by its headers: put, delete, purge or expire."""
    if headers.null_count == len(headers):
        return pa.array([PUT] * len(headers), pa.string())
    return operations(*(header_values(headers, name) for name in (OPERATION, MARKER)))


def operations(told: pa.StringArray, reasons: pa.StringArray) -> pa.StringArray:
    """Return the operations for these header values: put, delete, purge or expire."""
    unmarked = pc.equal(pc.coalesce(told, ""), "")
    return pc.coalesce(pc.if_else(unmarked, _looked_up(reasons, REASONS), _looked_up(told, OPERATIONS)), PUT)


def _looked_up(texts: pa.StringArray, meanings: Mapping[str, str]) -> pa.StringArray:
    """Return the meaning of each text; null for others."""
    at = pc.index_in(texts, pa.array(list(meanings), pa.string()))
    return pa.array(list(meanings.values()), pa.string()).take(at)


def _column_name(name: str) -> str:
    """Return the column name of a value's field; names of the bucket's own columns get `_` appended."""
    return f"{name}_" if name.lower().rstrip("_") in COLUMNS else name
