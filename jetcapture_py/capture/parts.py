"""Make the parts of a capture from its configuration, and describe its rule for keys and buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from jetcapture_py import plugins
from jetcapture_py.archive import layout
from jetcapture_py.archive.block_writer import BlockWriter, TextWriter, UserWriter, checked_writer, make_writer
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.config.block import BlockConfig
from jetcapture_py.config.buckets import COLUMNS
from jetcapture_py.config.column_types import parse_type
from jetcapture_py.config.decoding import DecodeConfig
from jetcapture_py.config.model import Config
from jetcapture_py.config.template import STREAM, parse_template
from jetcapture_py.errors import ConfigError
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.event_time import make_event_time
from jetcapture_py.transform.keys import KeyFunction, make_key
from jetcapture_py.transform.kv import BucketDecoder
from jetcapture_py.transform.prepare import Preparer

S = TypeVar("S")
T = TypeVar("T")


def preparer(config: Config, decoder: Decoder | None, key: KeyFunction | None) -> Preparer:
    """Build the part that decodes and routes messages. Raises ConfigError."""
    is_bucket = config.source.bucket is not None
    make = partial(make_key, decode=None if decoder else config.decode, own=COLUMNS if is_bucket else ())
    values = decoder or _made("decode", make_decoder, config.decode)
    return Preparer(
        stream=config.source.stream,
        consumer=config.source.consumer,
        decoder=BucketDecoder(values) if is_bucket else values,
        key=key or _made("key", make, config.key),
        interval=int(config.block.interval),
        keep_payload=config.decode.keep_payload,
        time=_made("block.time", partial(make_event_time, decode=None if decoder else config.decode), config.block),
        bundles=config.block.bundles,
    )


def encoder(
    config: Config, decoder: Decoder | None, key: KeyFunction | None, writer: BlockWriter | None = None
) -> Encoder:
    """Build the encoder of blocks; the incarnation of the stream is set later. Raises ConfigError."""

    def make(name: str) -> TextWriter | UserWriter | None:
        return make_writer(name, config.block.compression) if writer is None else checked_writer(writer, "writer")

    return Encoder(
        stream=config.source.stream,
        interval=int(config.block.interval),
        compression=config.block.compression,
        compatible=config.block.encoding == "compatible",
        key_rule=describe_key(config.key, config.decode, key, decoder),
        bundles=config.block.bundles,
        time=describe_time(config.block),
        format=_made("block.format", make, config.block.format),
    )


def _made(path: str, make: Callable[[S], T], setting: S) -> T:
    """Call `make` with a setting. Raises ConfigError with the setting's path when it cannot be used."""
    try:
        return make(setting)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def describe_key(template: str, decode: DecodeConfig, key: KeyFunction | None, decoder: Decoder | None) -> str:
    """Describe the rule for keys: the template or the function's name, and the source of the template's fields."""
    if key is not None:
        return _name(key)
    if plugins.is_reference(template):
        return template
    parts = parse_template(template)
    fields = dict.fromkeys(str(part.value) for part in parts if part.kind == "field" and part != STREAM)
    if not fields:
        return template
    if decoder is not None or decode.known is None or not decode.known.infers:
        return f"{template} (fields of {decode.format if decoder is None else _name(decoder)})"
    if not decode.columns:
        return f"{template} (fields as sent)"
    return f"{template} ({', '.join(f'{field}: {_declared(field, decode)}' for field in fields)})"


def describe_time(block: BlockConfig) -> str:
    """Describe the source of the buckets' time: `timestamp`, `placed_at`, `header.X-At in ms, else timestamp`."""
    unit = f" in {block.time_unit}" if block.time_unit else ""
    return f"{block.time}{unit}{f', else {block.time_fallback}' if block.time_fallback else ''}"


def _name(code: Any) -> str:
    """Return `module:name` of a function, or of an object's class."""
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}:{named.__qualname__}"


def _declared(field: str, decode: DecodeConfig) -> str:
    """Describe the declared column that a template's field is taken from."""
    stored = {layout.field_name(name): column for name, column in decode.columns.items()}
    head = field.split(".")[0]
    for name in (field, layout.field_name(field), layout.field_name(head)):
        if (column := stored.get(name)) is not None:
            parts = [
                str(parse_type(column.type)),
                column.unit and f"in {column.unit}",
                column.path and f"at {column.path}",
            ]
            return " ".join(part for part in parts if part)
    return "none"
