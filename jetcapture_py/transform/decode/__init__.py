"""Decoders: payloads to columns, one file per format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from jetcapture_py import plugins
from jetcapture_py.archive.schema import conform, unify
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.transform.batch import Decoded, Decoder, MessageBatch
from jetcapture_py.transform.decode.json_declared import JsonDecoder
from jetcapture_py.transform.decode.json_inferred import InferringJsonDecoder

if TYPE_CHECKING:
    from jetcapture_py.config.decoding import DecodeConfig
    from jetcapture_py.transform.decode.unpack import Unpacker

__all__ = [
    "InferringJsonDecoder",
    "JsonDecoder",
    "RawDecoder",
    "conform",
    "make_decoder",
    "make_unpacker",
    "parse_type",
    "unify",
]


class RawDecoder:
    """Accepts every message and adds no fields: payloads stay unchanged in the envelope.

    Every `Decoded` without columns has `fields.num_columns == 0` (and 0 rows, as Arrow counts them); with `messages`
    None it means every message of the batch, else those listed.
    """

    def decode(self, batch: MessageBatch) -> Decoded:  # noqa: ARG002  the protocol's signature
        """All messages of `batch`, no fields."""
        return Decoded(fields=pa.RecordBatch.from_arrays([], names=[]))


def make_decoder(config: DecodeConfig) -> Decoder:
    """Return the configured decoder. Raises ValueError with one line."""
    decoder = _user_decoder(config) if config.format not in _FORMATS else _FORMATS[config.format](config)
    if (unpack := make_unpacker(config)) is None:
        return decoder
    from jetcapture_py.transform.decode.unpack import UnpackingDecoder

    return UnpackingDecoder(decoder, unpack)


def _raw(config: DecodeConfig) -> Decoder:
    if config.columns:
        raise ValueError(_NO_COLUMNS.format(config.format))
    return RawDecoder()


def _json(config: DecodeConfig) -> Decoder:
    return JsonDecoder(config.columns) if config.columns else InferringJsonDecoder()


def _msgpack(config: DecodeConfig) -> Decoder:
    from jetcapture_py.transform.decode import msgpack

    return msgpack.MsgpackDecoder(config.columns) if config.columns else msgpack.InferringMsgpackDecoder()


def _delimited(config: DecodeConfig) -> Decoder:
    from jetcapture_py.transform.decode.delimited import DelimitedDecoder

    return DelimitedDecoder(
        config.columns,
        delimiter="\t" if config.format == "tsv" else config.delimiter,
        header=config.header,
        null_text=config.null_text,
        lines=config.rows == "lines",
    )


def _avro(config: DecodeConfig) -> Decoder:
    from jetcapture_py.transform.decode.avro import make

    return make(config)


def _protobuf(config: DecodeConfig) -> Decoder:
    from jetcapture_py.transform.decode.protobuf import make

    return make(config)


_FORMATS: Mapping[str, Callable[[DecodeConfig], Decoder]] = {
    "raw": _raw,
    "json": _json,
    "msgpack": _msgpack,
    "csv": _delimited,
    "tsv": _delimited,
    "avro": _avro,
    "protobuf": _protobuf,
}
_NO_COLUMNS = "columns can be declared for json, msgpack, csv, tsv, avro and protobuf, not for {0!a}"


def _user_decoder(config: DecodeConfig) -> Decoder:
    if config.columns:
        raise ValueError(_NO_COLUMNS.format(config.format))
    if not plugins.is_reference(config.format):
        raise ValueError(f"unknown format {config.format!a}: {', '.join(_FORMATS)} or package.module:object")
    return cast("Decoder", plugins.make(config.format, "decoder", "decode"))


def make_unpacker(config: DecodeConfig) -> Unpacker | None:
    """Return what inflates and splits payloads before they are decoded; None where they are decoded as they are."""
    if config.compression == "none" and (config.format, config.rows) not in _SPLITS:
        return None
    from jetcapture_py.transform.decode import unpack
    from jetcapture_py.transform.decode.compression import inflater

    split = _SPLITS.get((config.format, config.rows))
    return unpack.Unpacker(
        inflate=None if config.compression == "none" else inflater(config.compression, config.max_inflated),
        split=None if split is None else getattr(unpack, split),
    )


_SPLITS = {
    ("json", "lines"): "split_lines",
    ("json", "array"): "split_json_array",
    ("msgpack", "array"): "split_msgpack_array",
    ("protobuf", "delimited"): "split_delimited",
}
"""Functions of `unpack` by format and rows; other formats split their payloads themselves."""
