"""A decoder and a key function for payloads such as `21.5;68`; docs/recipes.md has a configuration that names them."""

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import Decoded, Failure, MessageBatch, layout


class ReadingDecoder:
    """Decode `temperature;humidity`."""

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message by itself; a wrong one is a failure."""
        readings, messages, failures = [], [], []
        for index, payload in enumerate(batch.column(layout.PAYLOAD).to_pylist()):
            try:
                temperature, humidity = map(float, payload.split(b";"))
            except ValueError as error:
                failures.append(Failure(index=index, stage="decode", error=str(error)))
            else:
                readings.append({"temperature": temperature, "humidity": humidity})
                messages.append(index)
        schema = pa.schema({"temperature": pa.float64(), "humidity": pa.float64()})
        fields = pa.RecordBatch.from_pylist(readings, schema)
        return Decoded(fields=fields, messages=pa.array(messages, pa.int32()), failures=tuple(failures))


def site(batch: MessageBatch, fields: pa.RecordBatch) -> pa.StringArray:  # noqa: ARG001  a key may depend on fields
    """Return the second token of each subject."""
    return pc.struct_field(pc.extract_regex(batch.column(layout.SUBJECT), r"^[^.]+\.(?P<site>[^.]+)"), "site")
