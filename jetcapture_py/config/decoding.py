"""The `decode` section: how messages become columns, and which settings go together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jetcapture_py.config import values as types
from jetcapture_py.config.section import Section, either, setting, wrong


class Column(Section):
    """A declared column of decoded messages."""

    type: types.TypeText = Field(description="Arrow type, such as int64, timestamp or list<string>.")
    path: str | None = setting("Path of the value in the message; default: the column's name.", min_length=1)
    unit: Literal["s", "ms", "us", "ns"] | None = setting("Unit of a timestamp that is sent as a number.")


def _column(value: object) -> object:
    if isinstance(value, str):
        return {"type": value}
    if not isinstance(value, dict | Column):
        raise ValueError("expected a type such as int64, or a mapping with type and path")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format that payloads are decoded from."""

    module: str
    """The decoder's module in `transform.decode`; `decode/__init__.py` describes its contents."""
    needs: tuple[str, ...] = ()
    """Settings of `decode` that must be set."""
    takes: tuple[str, ...] = ()
    """Settings of `decode` that may be set, besides those of every format."""
    rows: tuple[str, ...] = ()
    """Values of `decode.rows` with several rows of a payload."""
    infers: bool = False
    """Whether the types of undeclared columns depend on other messages."""
    empty: bool = False
    """Whether an empty payload is a valid message."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of `decode` that only some formats have."""
        return self.needs + self.takes


FORMATS = {
    "json": Format(module="json_declared", takes=("columns",), rows=("lines", "array"), infers=True),
    "msgpack": Format(module="msgpack", takes=("columns",), rows=("array",), infers=True),
    "csv": Format(module="delimited", needs=("columns",), takes=("header", "null_text", "delimiter"), rows=("lines",)),
    "tsv": Format(module="delimited", needs=("columns",), takes=("header", "null_text"), rows=("lines",)),
    "avro": Format(module="avro", needs=("schema",), takes=("columns", "registry"), rows=("container",)),
    "protobuf": Format(
        module="protobuf", needs=("schema", "message"), takes=("columns",), rows=("delimited",), empty=True
    ),
}
"""The built-in formats, besides raw, which keeps payloads as they are."""
_FIELDS = {"schema": "schema_file"}
"""Attributes whose names differ from their settings."""


class DecodeConfig(Section):
    """How messages become columns."""

    format: Annotated[str, types.one_of("raw", *FORMATS)] = setting(
        "`raw` (envelope and payload only), `json`, `msgpack`, `csv`, `tsv`, `avro`, `protobuf`, or a "
        "decoder: `package.module:object`.",
        default="raw",
    )
    columns: dict[str, Annotated[Column, BeforeValidator(_column, json_schema_input_type=str | Column)]] = Field(
        default_factory=dict,
        description="Columns by name: a type, or a mapping with `type`, `path` and `unit`. Default: inferred, or all "
        "fields of `schema`.",
    )
    on_conflict: Literal["rescue", "quarantine", "widen"] | None = setting(
        "What happens to a value that does not fit its column. `rescue`: it moves to `_nats_rescued` (only inferred "
        "columns, and their default). `quarantine`: its message moves there (default with declared types). `widen`: an "
        "inferred column follows, in the end as text.",
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

    @property
    def known(self) -> Format | None:
        """The built-in format; None for raw and for a user's decoder."""
        return FORMATS.get(self.format)

    @property
    def infers(self) -> bool:
        """Whether columns are inferred from messages."""
        return self.known is not None and self.known.infers and not self.columns

    @property
    def conflict(self) -> Literal["rescue", "quarantine", "widen"]:
        """What happens to a value that does not fit its column."""
        return self.on_conflict or ("rescue" if self.infers else "quarantine")

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        name, known = self.format, self.known
        for setting_ in dict.fromkeys(chain.from_iterable(other.settings for other in FORMATS.values())):
            field = _FIELDS.get(setting_, setting_)
            default = type(self).model_fields[field].get_default(call_default_factory=True)
            if getattr(self, field) != default and (known is None or setting_ not in known.settings):
                formats = [other for other, its in FORMATS.items() if setting_ in its.settings]
                raise wrong(setting_, f"only with decode.format {either(formats)}, not with {name}")
        if self.rows != "one" and (known is None or self.rows not in known.rows):
            formats = [other for other, its in FORMATS.items() if self.rows in its.rows]
            raise wrong("rows", f"{self.rows} is only for decode.format {either(formats)}, not for {name}")
        for setting_ in known.needs if known else ():
            if not getattr(self, _FIELDS.get(setting_, setting_)):
                raise wrong(setting_, f"required with decode.format {name}, but not set")
        if self.conflict != "quarantine" and not self.infers:
            columns = "declared ones" if self.columns else f"decode.format {name}"
            raise wrong("on_conflict", f"{self.conflict} is only for inferred columns, not for {columns}")
        if name == "raw" and self.compression != "none":
            raise wrong("compression", "only with a format that decodes the payload, not with raw")
        if name == "raw" and not self.keep_payload:
            raise wrong("keep_payload", "false with format raw would keep nothing of a message")
        return self
