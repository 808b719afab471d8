"""Unpack payloads before decoding: decompress them, and split those with several rows.

A message fails as a whole, and alone, if its payload cannot be inflated or split, or if one row cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from jetcapture_py.archive import layout
from jetcapture_py.archive.arrays import Int32s
from jetcapture_py.transform.batch import BatchTooWideError, Decoded, Decoder, Failure, MessageBatch
from jetcapture_py.transform.decode.bounds import BYTES_AT_ONCE, MAX_ROWS, check_count
from jetcapture_py.transform.decode.common import REFUSALS, RowBatch, failure
from jetcapture_py.transform.decode.compression import Inflate

Split = Callable[[bytes], Sequence[Any]]
"""Returns the payloads of a message's rows. Raises one of `REFUSALS`."""


@dataclass(frozen=True, slots=True)
class Unpacker:
    """Decompresses and splits payloads; a step that is None is skipped."""

    inflate: Inflate | None = None
    split: Split | None = None

    def __call__(self, payloads: pa.BinaryArray) -> tuple[pa.BinaryArray, Int32s, dict[int, Failure]]:
        """Return the payloads to decode, the row of each one's message, and the failures of messages.

        Raises BatchTooWideError if they are too large for one batch.
        """
        items: list[Any] = []
        owners: list[int] = []
        counts: list[int] = []
        failures: dict[int, Failure] = {}
        size = 0
        for index, payload in enumerate(payloads.fill_null(b"").to_pylist()):
            try:
                content = payload if self.inflate is None or not payload else self.inflate(payload)
                size += len(content)
                if size > BYTES_AT_ONCE and len(payloads) > 1:
                    raise BatchTooWideError
                rows = [content] if self.split is None else self.split(content)
                check_count(len(rows))
            except REFUSALS as error:
                failures[index] = failure(index, error if payload else "the payload is empty")
                continue
            counts.append(len(rows))
            owners.append(index)
            items.extend(rows)
            if len(items) > MAX_ROWS and len(payloads) > 1:
                raise BatchTooWideError
        return pa.array(items, pa.binary()), np.repeat(np.array(owners, np.int32), counts), failures

    def first(self, batch: MessageBatch) -> MessageBatch:
        """Return `batch` with each payload replaced by that of the message's first row; null for failures."""
        parts = [self(batch.column(layout.PAYLOAD).slice(row, 1))[0] for row in range(len(batch))]
        firsts = [(part[0].as_py() or None) if len(part) else None for part in parts]
        return _with_payloads(batch, pa.array(firsts, pa.binary()))


class UnpackingDecoder:
    """Decodes unpacked payloads with another decoder."""

    def __init__(self, decoder: Decoder, unpack: Unpacker) -> None:
        self.decoder = decoder
        self._unpack = unpack

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`. Raises BatchTooWideError if it unpacks to too much."""
        items, owners, failures = self._unpack(batch.column(layout.PAYLOAD))
        whole = len(items) == len(batch) and not failures
        if self._unpack.split is not None:  # only for decoders that use nothing but the payload
            only = pa.RecordBatch.from_arrays([items], [layout.PAYLOAD])
            rows: MessageBatch = RowBatch(stream=batch.stream, rows=only, owners=owners)
        else:
            rows = batch if whole else MessageBatch(stream=batch.stream, rows=batch.rows.take(pa.array(owners)))
            rows = _with_payloads(rows, items)
        decoded = self.decoder.decode(rows)
        return decoded if whole else of_messages(decoded, owners, failures)


def _with_payloads(batch: MessageBatch, payloads: pa.BinaryArray) -> MessageBatch:
    at = batch.rows.schema.get_field_index(layout.PAYLOAD)
    return MessageBatch(stream=batch.stream, rows=batch.rows.set_column(at, layout.PAYLOAD, payloads))


def of_messages(decoded: Decoded, owners: Int32s, failures: dict[int, Failure]) -> Decoded:
    """Turn decoded items into rows of their messages; a message with a failed item has none."""
    sources = owners if decoded.messages is None else owners[decoded.messages.to_numpy()]
    several = np.bincount(owners) > 1 if len(owners) else np.zeros(0, np.bool_)
    late: dict[int, Failure] = {}
    for failed in decoded.failures:
        index = int(owners[failed.index])
        row = failed.index - int(np.searchsorted(owners, index))
        error = f"row {row}: {failed.error}" if several[index] else failed.error
        late.setdefault(index, replace(failed, index=index, error=error))
    fields, failures = decoded.fields, late | failures
    if failures:
        kept = ~np.isin(sources, list(failures))
        sources = sources[kept]
        fields = fields.filter(pa.array(kept)) if fields.num_columns else fields
    return replace(
        decoded,
        fields=fields,
        messages=pa.array(sources, pa.int32()),
        failures=tuple(failures[index] for index in sorted(failures)),
    )
