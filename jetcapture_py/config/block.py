"""The `block` section: limits of a block, the time of its bucket, and the format of its object."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.messages import wrong
from jetcapture_py.config.section import Section, human

MAX_BUNDLES = 10_000
"""More would have what bundles avoid: objects with few messages each."""
MANY_KEYS = 500
"""With more keys at the same time, a directory for each of them costs more than bundles."""
STORING_TIME = 60.0
"""Seconds that blocks may take to be stored once they are `max_age` old, before that is a problem."""


class BlockConfig(Section):
    """Limits of a block, the time of its bucket, and the format of its object."""

    interval: types.Interval = human(
        "15m", "Length of a bucket in the time that `block.time` names; must divide a day evenly."
    )
    max_age: types.Duration = Field(
        default_factory=lambda data: data.get("interval", 0.0),
        description="Wall-clock time since a block's first message after which it is stored; defaults to the interval.",
    )
    max_bytes: types.Size = human("128MiB", "Size in memory at which a block is stored.")
    max_messages: types.Count = Field(default=1_000_000, description="Number of messages at which a block is stored.")
    bundles: int = Field(
        default=0,
        ge=0,
        le=MAX_BUNDLES,
        description="`0`: a directory and objects for each key. Above 0, for hundreds of keys and more: this number of "
        "bundles, each with all messages of its keys, sorted by key, and the key as a column.",
    )
    time: types.BlockTime = Field(
        default="timestamp",
        description="The time that determines a message's bucket: `timestamp` (when the stream stored it), a decoded "
        "field, or `header.NAME`.",
    )
    time_unit: Literal["s", "ms", "us", "ns"] | None = Field(
        default=None, description="Unit of numbers in `block.time`; without it, a number is not a valid time."
    )
    time_fallback: Literal["timestamp"] | None = Field(
        default=None,
        description="`timestamp`: a message without a valid `block.time` gets the stream's timestamp; by default it "
        "goes to the quarantine.",
    )
    format: types.BlockFormat = Field(
        default="parquet",
        description="Format of the objects: `parquet`, `ndjson`, `csv`, or a writer: `package.module:object`.",
    )
    compression: Literal["none", "snappy", "gzip", "zstd", "lz4", "brotli"] = Field(
        default_factory=lambda data: "gzip" if data.get("format") in types.TEXT_FORMATS else "zstd",
        description="Compression of Parquet columns (default: zstd), or of whole NDJSON and CSV objects: `none`, "
        "`gzip` (default) or `zstd`.",
    )

    @property
    def late_after(self) -> float:
        """Age in seconds from which a message that is not stored is late."""
        return 2 * self.max_age + STORING_TIME

    @model_validator(mode="after")
    def _compressed(self) -> Self:
        if self.format in types.TEXT_FORMATS and self.compression not in types.TEXT_COMPRESSIONS:
            raise wrong("compression", f"expected none, gzip or zstd with format {self.format}, got {self.compression}")
        if self.format not in ("parquet", *types.TEXT_FORMATS) and "compression" in self.model_fields_set:
            raise wrong("compression", f"only with a built-in format: {self.format} compresses its objects itself")
        return self

    @model_validator(mode="after")
    def _time(self) -> Self:
        for name in ("time_unit", "time_fallback"):
            if self.time == "timestamp" and getattr(self, name) is not None:
                raise wrong(name, "only with a block.time other than timestamp")
        return self


def without_payloads(data: object) -> object:
    """Turn `decode.keep_payload` off by default if `block.format` is a text format; `data` is the whole configuration.

    Raises ValueError if nothing of a message would be kept.
    """
    if not isinstance(data, dict):
        return data
    block, decode = data.get("block"), data.get("decode") or {}
    if not isinstance(block, dict) or block.get("format") not in types.TEXT_FORMATS:
        return data
    if not isinstance(decode, dict) or decode.get("keep_payload") is not None:
        return data
    if decode.get("format", "raw") == "raw":
        raise ValueError(
            f"decode.keep_payload: with decode.format raw and block.format {block['format']}, set it to true: nothing "
            "of a message would be kept"
        )
    return {**data, "decode": {**decode, "keep_payload": False}}
