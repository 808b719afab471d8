"""Decoders: payloads to columns, one file per format.

A new format has an entry in `config.decoding.FORMATS`, and a module with

- `make(config)`, which returns a `Decoder`, or raises ValueError with one line;
- `SPLITS`, if its decoder does not split payloads of several rows: functions by values of `decode.rows`;
- `OBJECT_FORMAT`, if it infers types, for reading keys and times.

`json_declared.ObjectDecoder` decodes formats that msgspec reads as objects (example: `msgpack`), and dicts that a
library makes of payloads without a schema, through `msgspec.convert`. Other formats make rows of Python values with
`common.decode_rows`, and columns of these with `common.assemble` (example: `protobuf`). They call `bounds.check_values`
before a few bytes become something large.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.config.buckets import MARKER
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch, decode_some, header_values

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import DecodeConfig, Format
    from jetcapture_py.transform.decode.unpack import Unpacker


class RawDecoder:
    """Accepts every message and adds no fields: payloads stay unchanged in the envelope.

    Every `Decoded` without columns has `fields.num_columns == 0` (and 0 rows, as Arrow counts them); with `messages`
    None it means every message of the batch, else those listed.
    """

    def decode(self, batch: MessageBatch) -> Decoded:  # noqa: ARG002  the protocol's signature
        """Return all messages of `batch`, without fields."""
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))


class NullRows:
    """Decodes a message without a payload as a row of nulls, and others with `decoder`.

    `markers` only: messages of the server, with the header `Nats-Marker-Reason`.
    """

    def __init__(self, decoder: Decoder, *, markers: bool) -> None:
        self.decoder = decoder
        self._markers = markers

    def decode(self, batch: MessageBatch) -> Decoded:
        """Decode every message of `batch`; BatchTooWideError as by the decoder of payloads."""
        empty = pc.equal(pc.fill_null(pc.binary_length(batch.column(layout.PAYLOAD)), 0), 0)
        if self._markers and pc.any(empty).as_py():
            empty = pc.and_(empty, header_values(batch.column(layout.HEADERS), MARKER).is_valid())
        return decode_some(self.decoder, batch, ~empty.to_numpy(zero_copy_only=False))


def make_decoder(config: DecodeConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    if config.format == "raw":
        decoder: Decoder = RawDecoder()
    elif config.known is not None:
        decoder = module_of(config.known).make(config)
    else:
        decoder = cast("Decoder", plugins.make(config.format, "decoder", "decode"))
    if (unpack := make_unpacker(config)) is not None:
        from jetcapture_py.transform.decode.unpack import UnpackingDecoder

        decoder = UnpackingDecoder(decoder, unpack)
    if config.format == "raw":
        return decoder
    return NullRows(decoder, markers=config.known is None or config.known.empty)


def make_unpacker(config: DecodeConfig) -> Unpacker | None:
    """Return the function that inflates and splits payloads before decoding; None if not needed."""
    split = None
    if config.known is not None and config.rows != "one":
        split = getattr(module_of(config.known), "SPLITS", {}).get(config.rows)
    if config.compression == "none" and split is None:
        return None
    from jetcapture_py.transform.decode.compression import inflater
    from jetcapture_py.transform.decode.unpack import Unpacker

    inflate = None if config.compression == "none" else inflater(config.compression, config.max_inflated)
    return Unpacker(inflate=inflate, split=split)


def module_of(known: Format) -> Any:
    """Return the module with a format's decoder; modules are imported on demand."""
    return import_module(f"{__name__}.{known.module}")
