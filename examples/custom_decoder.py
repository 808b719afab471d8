"""The capture as a library, with a custom decoder and a custom key function.

    python examples/custom_decoder.py CONFIG

Devices publish to `readings.{site}-{number}`. A payload is any number of readings of 16 bytes, each the time in
microseconds since 1970 and a value. Every reading becomes a row of the archive, with `_nats_row` as its position in
the message, and every site a directory. CONFIG is a capture's configuration; its `decode.format` and
`key` are not used.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import Capture, Decoded, Failure, MessageBatch, layout, load, log

READING = np.dtype([("at", "<i8"), ("value", "<f8")])


class ReadingsDecoder:
    """Payloads of packed readings to the columns `at` and `value`."""

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message by itself: one that is cut short is a failure, and costs no other its rows."""
        readings, messages, failures = [], [], []
        for index, payload in enumerate(batch.column(layout.PAYLOAD).to_pylist()):
            if payload and len(payload) % READING.itemsize == 0:
                readings.append(np.frombuffer(payload, READING))
                messages.append(np.full(len(readings[-1]), index, np.int32))
            else:
                error = f"{len(payload or b'')} bytes are not one or more readings of {READING.itemsize}"
                failures.append(Failure(index=index, stage="decode", error=error))
        rows = np.concatenate([np.empty(0, READING), *readings])
        fields = {
            "at": pa.array(rows["at"]).cast(pa.timestamp("us", "UTC")),
            "value": pa.array(rows["value"]),
        }
        return Decoded(
            fields=pa.RecordBatch.from_pydict(fields),
            messages=pa.array(np.concatenate([np.empty(0, np.int32), *messages])),
            failures=tuple(failures),
        )


def site(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:  # noqa: ARG001  a key may depend on fields
    """The site of every row's device; no key where the subject has none. A key depends on its own message alone."""
    found = pc.extract_regex(batch.column(layout.SUBJECT), r"^readings\.(?P<site>[a-z]+)-[0-9]+$")
    return pc.struct_field(found, "site")


async def main(path: Path) -> None:
    """Capture until SIGTERM or SIGINT, then store and acknowledge what is held."""
    config = load(path)
    log.setup(config.log.format, config.log.level)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Capture(config, decoder=ReadingsDecoder(), key=site).run(stop)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
