"""No decoding: the payload is stored unchanged in the envelope."""

from __future__ import annotations

import pyarrow as pa

from jetcapture_py.transform.batch import Decoded, MessageBatch


class RawDecoder:
    """Accepts every message and adds no fields.

    Every `Decoded` without columns has `fields.num_columns == 0` (and 0 rows, as Arrow counts them); with `messages`
    None it means every message of the batch, else those listed.
    """

    def decode(self, batch: MessageBatch) -> Decoded:  # noqa: ARG002  the protocol's signature
        """All messages of `batch`, no fields."""
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))
