"""The `decode` section: how messages become columns, and which settings go together."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, either, setting, wrong
from jetcapture_py.config.units import quoted


class Column(Section):
    """A declared column of decoded messages."""

    type: types.TypeText = Field(description="Arrow type, such as int64, timestamp or list<string>.")
    path: str | None = setting("Path of the value in the message; default: the column's name.", min_length=1)
    unit: Literal["s", "ms", "us", "ns"] | None = setting("Unit of a timestamp that is sent as a number.")


def _column(value: object) -> object:
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, dict | Column):
        raise ValueError(f"expected a type such as int64, or a mapping with type and path, got {quoted(value)}")
    return value


_TEXT_FORMATS = ("csv", "tsv")
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "columns": ("json", "msgpack", *_TEXT_FORMATS, "avro", "protobuf"),
    "schema": ("avro", "protobuf"),
    "message": ("protobuf",),
    "registry": ("avro",),
    "header": _TEXT_FORMATS,
    "null_text": _TEXT_FORMATS,
    "delimiter": ("csv",),
}
"""Formats that each setting applies to."""
_ROWS: dict[str, tuple[str, ...]] = {
    "one": (),
    "lines": ("json", *_TEXT_FORMATS),
    "array": ("json", "msgpack"),
    "container": ("avro",),
    "delimited": ("protobuf",),
}
_FIELDS = {"schema": "schema_file"}
"""Attributes whose names differ from their settings."""
_REQUIRED: dict[str, tuple[str, ...]] = {
    "columns": _TEXT_FORMATS,
    "schema": ("avro", "protobuf"),
    "message": ("protobuf",),
}


class DecodeConfig(Section):
    """How messages become columns."""

    format: types.DecodeFormat = setting(
        "`raw` (envelope and payload only), `json`, `msgpack`, `csv`, `tsv`, `avro`, `protobuf`, or a "
        "decoder: `package.module:object`.",
        default="raw",
    )
    columns: dict[str, Annotated[Column, BeforeValidator(_column, json_schema_input_type=str | Column)]] = Field(
        default_factory=dict,
        description="Columns by name: a type, or a mapping with `type`, `path` and `unit`. Default: inferred, or all "
        "fields of `schema`.",
    )
    keep_payload: bool = setting(
        "Store the raw bytes of every message, which makes the archive lossless. Off by default with "
        "`block.format` ndjson or csv.",
        default=True,
    )
    rows: Literal["one", "lines", "array", "container", "delimited"] = setting(
        "Rows of a message: `one`; `lines` (json, csv, tsv): one per line; `array` (json, msgpack): one "
        "per element; `container`: those of an Avro object container file; `delimited`: length-prefixed protobuf "
        "messages.",
        default="one",
    )
    compression: Literal["none", "gzip", "zstd", "snappy", "auto"] = setting(
        "Compression of payloads; `auto` recognizes gzip, zstd and framed snappy and treats anything else "
        "as uncompressed.",
        default="none",
    )
    max_inflated: types.Size = setting(
        "Maximum size of a decompressed payload; a message with a larger one goes to the quarantine.", default="64MiB"
    )
    schema_file: types.FilePath | None = setting(
        "File with the Avro schema (`.avsc`), or with the descriptor set that `protoc` writes.", alias="schema"
    )
    message: str | None = setting("Full name of the protobuf type, such as `shop.v1.Order`.", min_length=1)
    registry: types.Registry | None = setting(
        "Source of writers' Avro schemas: a directory of `<id>.avsc` files, or the address of a schema registry."
    )
    header: bool = setting("Whether csv and tsv payloads start with a line of field names.", default=False)
    null_text: str = setting("Unquoted text of a csv or tsv field that means null.", default="")
    delimiter: types.Delimiter = setting("Character between the fields of csv.", default=",")

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        kind = self.format
        for name, formats in _ONLY_FOR.items():
            field = _FIELDS.get(name, name)
            default = type(self).model_fields[field].get_default(call_default_factory=True)
            if kind not in formats and getattr(self, field) != default:
                raise wrong(name, f"only with decode.format {either(formats)}, not with {kind}")
        if (formats := _ROWS[self.rows]) and kind not in formats:
            raise wrong("rows", f"{self.rows} is only for decode.format {either(formats)}, not for {kind}")
        for name, formats in _REQUIRED.items():
            if kind in formats and not getattr(self, _FIELDS.get(name, name)):
                raise wrong(name, f"required with decode.format {kind}, but not set")
        if kind == "raw" and self.compression != "none":
            raise wrong("compression", "only with a format that decodes the payload, not with raw")
        if kind == "raw" and not self.keep_payload:
            raise wrong("keep_payload", "false with format raw would keep nothing of a message")
        return self
