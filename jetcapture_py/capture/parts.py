"""Make the parts of a capture from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from jetcapture_py.archive.block_writer import BlockWriter, TextWriter, UserWriter, checked_writer, make_writer
from jetcapture_py.archive.writer import Encoder
from jetcapture_py.capture import key_rule
from jetcapture_py.config.buckets import COLUMNS
from jetcapture_py.config.model import Config
from jetcapture_py.errors import ConfigError
from jetcapture_py.transform.batch import Decoder
from jetcapture_py.transform.bucket import BucketDecoder
from jetcapture_py.transform.decode import make_decoder
from jetcapture_py.transform.event_time import make_event_time
from jetcapture_py.transform.keys import KeyFunction, make_key
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
        key_rule=key_rule.describe(config.key, config.decode, key, decoder),
        bundles=config.block.bundles,
        time=key_rule.describe_time(config.block),
        format=_made("block.format", make, config.block.format),
    )


def _made(path: str, make: Callable[[S], T], setting: S) -> T:
    """Call `make` with a setting. Raises ConfigError with the setting's path when it cannot be used."""
    try:
        return make(setting)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
