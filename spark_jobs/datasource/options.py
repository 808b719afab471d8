"""The options of the `nats` data source, with one clear line per wrong or unknown option.

Option names ignore case and underscores, because Spark does not preserve the case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from jetcapture_py.config import values as types
from jetcapture_py.config.decoding import FORMATS, DecodeConfig
from jetcapture_py.config.model import NatsConfig, Section
from jetcapture_py.config.section import did_you_mean, validated, wrong
from jetcapture_py.errors import ConfigError
from jetcapture_py.jetstream.publish.publisher import WINDOW
from spark_jobs.publishing import login

_SPARKS_OWN = ("checkpointlocation", "queryname")
"""Options that Spark adds to those of a sink."""


def _position(*words: str) -> BeforeValidator:
    """Accept one of `words`, or a sequence."""

    def check(value: object) -> int | str:
        text = str(value).lower()
        if text in words:
            return text
        if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 63:
            return int(text)
        raise ValueError(f"expected {', '.join(words)} or a sequence from 1")

    return BeforeValidator(check)


def _parts(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


class WriteOptions(Section):
    """The target of rows; `window` limits the unacknowledged messages of each task.

    `format` is the format of payloads made from columns.
    """

    model_config = ConfigDict(alias_generator=to_camel)

    nats: NatsConfig
    subject: str | None = None
    format: Literal["json", "msgpack"] = "json"
    window: types.Count = WINDOW


class RangeOptions(Section):
    """The part of a stream to read, and the size of batches. `timeout`: seconds that NATS may be unavailable."""

    model_config = ConfigDict(alias_generator=to_camel)

    starting_timestamp: types.StartTime | None = None
    max_offsets_per_trigger: types.Count | None = None
    min_partitions: types.Count | None = None
    fail_on_data_loss: bool = True
    timeout: types.DurationOfSeconds = Field("60s", validate_default=True)


class CombinedOptions(RangeOptions):
    """A capture's configuration, and the part of its archive and stream to read; `keys` are separated by commas."""

    config: str
    keys: str | None = None
    start: str | None = None
    end: str | None = None
    starting_offsets: Annotated[int | str, _position("earliest", "latest")] = "earliest"
    max_bytes_per_trigger: types.Size | None = None


class ReadOptions(RangeOptions):
    """Stream, range and columns of a read; the end is exclusive."""

    nats: NatsConfig
    stream: types.Name
    subjects: Annotated[tuple[types.FilterSubject, ...], BeforeValidator(_parts)] = ()
    starting_offsets: Annotated[int | str, _position("earliest", "latest", "new", "last", "last_per_subject")] = (
        "earliest"
    )
    ending_offsets: Annotated[int | str, _position("latest")] = "latest"
    ending_timestamp: types.StartTime | None = None
    include_headers: bool = False
    format: Literal["raw", *FORMATS] = "raw"  # type: ignore[valid-type]
    columns: str = ""
    rows: str | None = None
    compression: str | None = None
    max_inflated: str | None = None
    schema_file: str | None = Field(None, alias="schema")
    message: str | None = None
    registry: str | None = None
    header: str | None = None
    null_text: str | None = None
    delimiter: str | None = None
    mode: Annotated[Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"], BeforeValidator(_upper)] = "PERMISSIVE"

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        for name in ("starting", "ending"):
            both = {f"{name}_offsets", f"{name}_timestamp"}
            if both <= self.model_fields_set:
                raise wrong(f"{name}Timestamp", f"cannot be combined with {name}Offsets")
        if self.columns and self.format == "raw":
            raise wrong("columns", "only with a format that decodes payloads, not with raw")
        return self

    def decoding(self, columns: Mapping[str, Mapping[str, Any]]) -> DecodeConfig:
        """Return the section `decode` of a capture that decodes payloads to `columns`. Raises ConfigError."""
        given = {name: getattr(self, name) for name in _DECODING if getattr(self, name) is not None}
        if "schema_file" in given:
            given["schema"] = given.pop("schema_file")
        data = {"format": self.format, "columns": columns, **given}
        return validated(
            DecodeConfig, data, rename=lambda line: to_camel(line.partition(":")[0]) + line[line.index(":") :]
        )

    def for_batch(self) -> Self:
        """Return the options; raise ConfigError for those of streaming queries only."""
        if self.max_offsets_per_trigger is not None:
            raise ConfigError("maxOffsetsPerTrigger: only in a streaming query")
        if self.starting_offsets in ("latest", "new"):
            raise ConfigError(f"startingOffsets: {self.starting_offsets} is only for streaming queries")
        return self

    def for_stream(self) -> Self:
        """Return the options; raise ConfigError for those of bounded reads only."""
        for name in ("ending_offsets", "ending_timestamp"):
            if name in self.model_fields_set:
                raise ConfigError(f"{to_camel(name)}: a streaming query has no end")
        return self


_NO_TABLES = (
    "Spark does not store table options for a Python data source; use CREATE TEMPORARY VIEW name USING nats OPTIONS (…)"
)

_DECODING = DecodeConfig.model_fields.keys() - {"format", "columns", "keep_payload", "on_conflict"}
"""Options that are settings of a capture's section `decode`: without those of what is archived or inferred."""
Kind = TypeVar("Kind", bound=Section)


def parse(kind: type[Kind], given: Mapping[str, str]) -> Kind:
    """Validate options. Raises ConfigError, which never contains a secret.

    Without any options the default server is not assumed: CREATE TABLE drops all options.
    """
    if not given:
        raise ConfigError(f"no options are set, not even servers; for a table: {_NO_TABLES}")
    if any(name.lower() == "provider" for name in given):
        raise ConfigError(f"CREATE TABLE: {_NO_TABLES}")
    aliases = [field.alias or to_camel(name) for name, field in kind.model_fields.items() if name != "nats"]
    names = {_fold(alias): alias for alias in aliases}
    own_login = "nats" in kind.model_fields
    names |= {_fold(name): name for name in login.OPTIONS if own_login}
    chosen: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() in _SPARKS_OWN:
            continue
        if name.lower() == "path":
            raise ConfigError("path: not supported; call load() and save() without an argument")
        if _fold(name) not in names:
            raise ConfigError(f"{name}: unknown option{did_you_mean(name, names.values())}")
        chosen[names[_fold(name)]] = value
    logins = {name: value for name, value in chosen.items() if name in login.OPTIONS}
    data: dict[str, Any] = {name: value for name, value in chosen.items() if name not in logins}
    return validated(kind, data | ({"nats": login.nats_config(logins)} if own_login else {}))


def _fold(name: str) -> str:
    return name.replace("_", "").lower()
