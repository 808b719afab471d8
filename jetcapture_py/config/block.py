"""The `block` section: limits of a block, its time slice, and the format of its object."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, setting, wrong

MAX_BUNDLES = 10_000
"""More bundles would again give objects with few messages each."""
MANY_KEYS = 500
"""With more keys at the same time, a directory per key costs more than bundles."""
STORING_TIME = 60.0
"""Maximum seconds for storing a block after `max_age`; longer is a problem."""


class BlockConfig(Section):
    """Limits of a block, its time slice, and the format of its object."""

    interval: types.Interval = setting(
        "Length of a time slice, in the time that `block.time` names; must divide a day evenly.", default="15m"
    )
    max_age: types.Duration = Field(
        default_factory=lambda data: data.get("interval", 0.0),
        description="Wall-clock time since a block's first message after which it is stored; defaults to the interval.",
    )
    max_bytes: types.Size = setting("Size in memory at which a block is stored.", default="128MiB")
    max_messages: types.Count = setting("Number of messages at which a block is stored.", default=1_000_000)
    bundles: int = setting(
        "`0`: a directory and objects for each key. Above 0, for hundreds of keys and more: this number of "
        "bundles, each with all messages of its keys, sorted by key, and the key as a column.",
        default=0,
        ge=0,
        le=MAX_BUNDLES,
    )
    time: types.BlockTime = setting(
        "The time that determines a message's time slice: `timestamp` (when the stream stored it), a decoded "
        "field, or `header.NAME`.",
        default="timestamp",
    )
    time_unit: Literal["s", "ms", "us", "ns"] | None = setting(
        "Unit of numbers in `block.time`; without it, a number is not a valid time."
    )
    time_fallback: Literal["timestamp"] | None = setting(
        "`timestamp`: a message without a valid `block.time` gets the stream's timestamp; by default it "
        "goes to the quarantine."
    )
    format: types.BlockFormat = setting(
        "Format of the objects: `parquet`, `ndjson`, `csv`, or a writer: `package.module:object`.", default="parquet"
    )
    compression: Literal["none", "snappy", "gzip", "zstd", "lz4", "brotli"] = Field(
        default_factory=lambda data: "gzip" if data.get("format") in types.TEXT_FORMATS else "zstd",
        description="Compression of Parquet columns (default: zstd), or of whole NDJSON and CSV objects: `none`, "
        "`gzip` (default) or `zstd`.",
    )
    encoding: Literal["compact", "compatible"] = setting(
        "Encoding of numbers and times in Parquet: `compact` also uses DELTA_BINARY_PACKED, `compatible` only what "
        "every reader knows, which takes more space.",
        default="compact",
    )

    @property
    def late_after(self) -> float:
        """Age in seconds from which an unstored message is late."""
        return 2 * self.max_age + STORING_TIME

    @model_validator(mode="after")
    def _compressed(self) -> Self:
        if self.format in types.TEXT_FORMATS and self.compression not in types.TEXT_COMPRESSIONS:
            raise wrong("compression", f"expected none, gzip or zstd with format {self.format}")
        if self.format not in ("parquet", *types.TEXT_FORMATS) and "compression" in self.model_fields_set:
            raise wrong("compression", f"only with a built-in format: {self.format} compresses its objects itself")
        if self.format != "parquet" and "encoding" in self.model_fields_set:
            raise wrong("encoding", f"only with format parquet, not with {self.format}")
        return self

    @model_validator(mode="after")
    def _time(self) -> Self:
        for name in ("time_unit", "time_fallback"):
            if self.time == "timestamp" and getattr(self, name) is not None:
                raise wrong(name, "only with a block.time other than timestamp")
        return self
