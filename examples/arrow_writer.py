"""A custom writer: objects as Arrow IPC files, which Arrow and Polars read directly.

    PYTHONPATH=examples jetcapture run examples/arrow.yaml

A writer gets the rows of a block as a table, sorted, each message once, and returns the bytes of the object. Its
obligations are in `jetcapture_py.BlockWriter`.
"""

from __future__ import annotations

import pyarrow as pa


class ArrowWriter:
    """Writes Arrow IPC files, compressed with zstd."""

    suffix = ".arrow"

    def write(self, table: pa.Table) -> pa.Buffer:
        """Return the rows as a file. They are copied into one batch, so that the same rows give the same bytes."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as file:
            file.write_table(table.combine_chunks())
        return sink.getvalue()
