"""A writer of a format of your own: objects as Arrow IPC files, which Arrow, Polars and DuckDB map into memory.

    PYTHONPATH=examples jetcapture run examples/arrow.yaml

A writer gets the rows of a block as a table, sorted, each message once, and returns the bytes of the object. What it
promises is in `jetcapture_py.BlockWriter`; `read` lets `jetcapture verify` prove what is in an object.
"""

from __future__ import annotations

import pyarrow as pa


class ArrowWriter:
    """Writes Arrow IPC files, compressed with zstd."""

    suffix = ".arrow"

    def write(self, table: pa.Table) -> pa.Buffer:
        """Return the rows as a file. The same rows make the same bytes, because they are copied into one batch."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as file:
            file.write_table(table.combine_chunks())
        return sink.getvalue()

    def read(self, data: pa.Buffer) -> pa.Table:
        """Return the rows of a file; raises for what is none."""
        with pa.ipc.open_file(data) as file:
            return file.read_all()
