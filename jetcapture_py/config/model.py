"""The configuration: one YAML file, checked whole before anything starts. Nothing else reads the environment.

`load` returns a `Config` or raises `ConfigError` with one line per problem. A setting without a value (`user:`) counts
as missing. Durations are seconds as float, sizes bytes as int; see `units` for how they are written, and `yaml_text`
for environment variables. Secrets are never part of a message or a repr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema

from jetcapture_py.config import buckets, yaml_text
from jetcapture_py.config import values as types
from jetcapture_py.config.block import BlockConfig as BlockConfig
from jetcapture_py.config.block import without_payloads
from jetcapture_py.config.decoding import Column as Column
from jetcapture_py.config.decoding import DecodeConfig
from jetcapture_py.config.messages import problems, wrong
from jetcapture_py.config.nats import NatsConfig as NatsConfig
from jetcapture_py.config.nats import TlsConfig as TlsConfig
from jetcapture_py.config.output import LimitsConfig as LimitsConfig
from jetcapture_py.config.output import OnStoredConfig as OnStoredConfig
from jetcapture_py.config.output import SpoolConfig as SpoolConfig
from jetcapture_py.config.output import StoreConfig as StoreConfig
from jetcapture_py.config.section import Section as Section
from jetcapture_py.config.section import human
from jetcapture_py.config.stream import ConsumerSection, StreamSection
from jetcapture_py.config.subjects import covers
from jetcapture_py.config.units import kind, quoted
from jetcapture_py.errors import ConfigError

MANY_UNACKED = 100_000
TOO_MANY_UNACKED = 300_000
"""Above this the server, whose redelivery time grows with the square of the unacked messages, stalls for minutes."""


def _one_of_three(section: dict[str, Any]) -> None:
    """Say in the JSON Schema that one of three settings names the stream."""
    section["required"].remove("stream")
    section["oneOf"] = [{"required": [setting]} for setting in ("stream", *buckets.PREFIXES)]


class SourceConfig(Section):
    """The JetStream consumer that messages come from. `stream` is also set for a bucket or an object store."""

    model_config = ConfigDict(json_schema_extra=_one_of_three)

    stream: types.StreamName = Field(
        description="Stream to capture; required unless `bucket` or `object_store` is set."
    )
    bucket: types.BucketName | None = Field(
        default=None,
        description="KV bucket to capture, in place of `stream`: adds the columns `key_name`, `operation` and "
        "`revision`.",
    )
    object_store: types.BucketName | None = Field(
        default=None, description="Object store to capture, in place of `stream`."
    )
    consumer: types.Name = Field(description="Durable pull consumer, shared by all replicas.")
    create: bool = Field(
        default=True,
        description="Create the consumer if it is missing; an existing one is used as it is.",
    )
    filter_subjects: tuple[types.FilterSubject, ...] = Field(
        default=(), description="Subjects to capture; empty means all."
    )
    deliver_policy: Literal["all", "last", "last_per_subject", "new", "by_start_sequence", "by_start_time"] = Field(
        default="all", description="Where a new consumer starts."
    )
    start_sequence: types.Count | None = Field(
        default=None, description="First sequence; only with `by_start_sequence`."
    )
    start_time: types.StartTime | None = Field(
        default=None, description="First time, RFC 3339; only with `by_start_time`."
    )
    replay_policy: Literal["instant", "original"] = Field(
        default="instant",
        description="Speed of delivery for stored messages: immediate, or the pace they arrived at.",
    )
    ack_wait: types.DurationOfSeconds = human(
        "2m",
        "How long the server waits before it redelivers a message; may be shorter than a block's age.",
    )
    max_ack_pending: types.Count = Field(
        default=50_000, description="Maximum number of messages delivered and not yet acknowledged, over all replicas."
    )
    allow_many_unacked: bool = Field(default=False, description=f"Allow `max_ack_pending` above {TOO_MANY_UNACKED:,}.")
    batch: types.Count = Field(default=5_000, description="Messages that one pull asks for.")
    consumer_config: ConsumerSection | None = Field(
        default=None, description="Further settings of the consumer, for a new one and for `jetcapture apply`."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_once(cls, data: object) -> object:
        """Set `stream` for a bucket or an object store."""
        if not isinstance(data, dict):
            return data
        given = [name for name in ("stream", *buckets.PREFIXES) if data.get(name) is not None]
        if len(given) > 1:
            raise wrong(given[1], f"cannot be combined with {given[0]}")
        if not given or given[0] == "stream":
            return data
        name = data[given[0]]  # checked as a setting of its own
        suffix = name if isinstance(name, str) and buckets.is_name(name) else "_"
        return {**data, "stream": f"{buckets.PREFIXES[given[0]]}{suffix}"}

    @property
    def holds(self) -> tuple[str, str] | None:
        """The setting `bucket` or `object_store` and its value; None with `stream`."""
        return next(((each, name) for each in buckets.PREFIXES if (name := getattr(self, each)) is not None), None)

    @property
    def default_key(self) -> str:
        """The key template without the setting `key`."""
        return "{subject}" if self.holds is None else buckets.DEFAULT_KEYS[self.holds[0]]

    @model_validator(mode="after")
    def _start(self) -> Self:
        for name, value in (("start_sequence", self.start_sequence), ("start_time", self.start_time)):
            policy = f"by_{name}"
            if value is None and self.deliver_policy == policy:
                raise wrong(name, f"required with deliver_policy {policy}, but not set")
            if value is not None and self.deliver_policy != policy:
                raise wrong(name, f"only with deliver_policy {policy}, not with {self.deliver_policy}")
        if self.max_ack_pending > TOO_MANY_UNACKED and not self.allow_many_unacked:
            reason = "the server's time to redeliver grows with the square of the unacked messages"
            raise wrong(
                "max_ack_pending",
                f"expected at most {TOO_MANY_UNACKED}, got {self.max_ack_pending}: {reason}; "
                "source.allow_many_unacked: true allows it",
            )
        if self.consumer_config and self.consumer_config.backoff and "ack_wait" in self.model_fields_set:
            raise wrong("ack_wait", "cannot be combined with consumer_config.backoff, which replaces it")
        return self


class HttpConfig(Section):
    """Metrics, probes and status page of the running process."""

    listen: types.Listen = Field(
        default="127.0.0.1:8080",
        description="Address and port of /metrics, /livez, /readyz and the status page; `:8080`: all addresses.",
    )


class LogConfig(Section):
    """Logging."""

    format: Literal["auto", "text", "json"] = Field(
        default="auto", description="`auto` is text on a terminal and JSON elsewhere."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )


def same_stream(stream: StreamSection | None, source: SourceConfig | None) -> None:
    """Raise an error for a validator when the two sections name different streams."""
    if stream is not None and source is not None and stream.name not in (None, source.stream):
        setting, _ = source.holds or ("stream", "")
        raise wrong("stream", f"expected the name {source.stream}, as in source.{setting}, got {quoted(stream.name)}")


class Config(Section):
    """The configuration of one capture."""

    keeps_null = frozenset({"key", "http"})

    nats: NatsConfig = Field(default_factory=NatsConfig, description="Connection to NATS.")
    stream: StreamSection | None = Field(
        default=None,
        description="The stream, for `jetcapture apply` and `jetcapture check`. What is left out stays as it is on the "
        "server. Names are those of the JetStream API.",
    )
    source: SourceConfig = Field(description="Where messages come from.")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="How messages become columns.")
    key: types.Template = Field(
        default_factory=lambda data: data["source"].default_key if "source" in data else "",  # it may be wrong
        description='A template such as "{subject[1]}", "{header.X-Tenant}" or "{region}", "" for one key (default '
        "with `source.bucket`), or your own function: `package.module:function`. A message without such a part "
        "has no key, and an empty key is none. With `source.object_store`, the default is `{subject[2]}`: metadata and "
        "contents apart.",
    )
    block: BlockConfig = Field(default_factory=BlockConfig, description="When a block is sealed.")
    store: StoreConfig = Field(description="Where objects are stored.")
    on_stored: OnStoredConfig = Field(default_factory=OnStoredConfig, description="Notifications of stored objects.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Limits of the capture.")
    http: HttpConfig | None = Field(
        default_factory=HttpConfig, description="Metrics, probes and status page; `null` turns them off."
    )
    log: LogConfig = Field(default_factory=LogConfig, description="Logging.")
    drain_timeout: types.Duration = human("60s", "Time to store and acknowledge held messages when the process stops.")

    @model_validator(mode="after")
    def _bucket(self) -> Self:
        if self.source.object_store is not None and self.decode.format != "raw":
            raise wrong("decode.format", "only raw with source.object_store, whose messages are parts of files")
        field = self.block.time != "timestamp" and not self.block.time.startswith("header.")
        if self.source.bucket is not None and field and self.block.time_fallback is None:
            raise wrong(
                "block.time_fallback",
                "required with source.bucket and a field: deletions have none, so set it to timestamp",
            )
        return self

    @model_validator(mode="after")
    def _one_stream(self) -> Self:
        same_stream(self.stream, self.source)
        return self

    @model_validator(mode="after")
    def _one_root(self) -> Self:
        if self.block.bundles and "{key}" in self.store.url:
            raise wrong("store.url", "cannot contain {key} with block.bundles, whose objects have many keys each")
        return self

    @model_validator(mode="before")
    @classmethod
    def _text_without_payloads(cls, data: object) -> object:
        return without_payloads(data)

    @model_validator(mode="after")
    def _no_loop(self) -> Self:
        subject = (self.on_stored.subject or "").replace("{stream}", self.source.stream)
        for pattern in self.source.filter_subjects if subject else ():
            if covers(pattern, subject):
                raise wrong(
                    "on_stored.subject",
                    f"{subject} is itself captured ({pattern}), so every object would cause another",
                )
        return self

    @model_validator(mode="after")
    def _spool_elsewhere(self) -> Self:
        spool, root = self.limits.spool, self.store.url.removeprefix("file://")
        if spool and root.startswith("/") and spool.path.resolve().is_relative_to(Path(root).resolve()):
            raise wrong("limits.spool.path", f"{spool.path} is inside the archive, {root}; expected another directory")
        return self

    def warnings(self) -> tuple[str, ...]:
        """Return one line per setting that works but is likely to cause trouble."""
        found = []
        if (unacked := self.source.max_ack_pending) > MANY_UNACKED:
            found.append(
                f"source.max_ack_pending: {unacked} is above {MANY_UNACKED}; after a crash the server's time to "
                "redeliver grows with the square of the unacked messages"
            )
        return tuple(found)


def load(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration from a file. Raises ConfigError with one line per problem."""
    return loads(read_text(Path(path), os.fspath(path)), env)


def loads(text: str, env: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration from YAML text. Raises ConfigError with one line per problem."""
    return parse(yaml_text.read(text, env), env)


def parse(data: object, env: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration from plain values, as parsed from YAML. Raises ConfigError.

    `env` says where the contexts of the NATS CLI are.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping of settings, got {kind(data)}")
    try:
        return Config.model_validate(data, context={"env": env})
    except ValidationError as error:
        found = problems(error, Config)
    # Raised outside of the handler: the validation error holds the secrets, and would be this one's context.
    raise ConfigError(*found)


class Managed(Section):
    """The sections that `jetcapture apply` needs. At least one of `stream` and `source` is set."""

    nats: NatsConfig = Field(default_factory=NatsConfig)
    stream: StreamSection | None = None
    source: SourceConfig | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.stream is None and self.source is None:
            raise wrong("stream", "required, but not set (or set source)")
        if self.source is None and self.stream is not None and self.stream.name is None:
            raise wrong("stream", "its name is required without source, but not set")
        same_stream(self.stream, self.source)
        return self

    @property
    def stream_name(self) -> str:
        """The stream's name."""
        return self.source.stream if self.source else str(self.stream and self.stream.name)


def load_managed(path: Path, env: Mapping[str, str] = os.environ) -> Managed:
    """Read the sections that `jetcapture apply` manages, from a whole configuration or a file with only these sections.

    Raises ConfigError with one line per problem.
    """
    data = yaml_text.read(read_text(path, str(path)), env)
    if not isinstance(data, dict) or data.keys() - Managed.model_fields.keys():
        whole = parse(data, env)
        return Managed.model_construct(nats=whole.nats, stream=whole.stream, source=whole.source)
    try:
        return Managed.model_validate(data, context={"env": env})
    except ValidationError as error:
        found = problems(error, Managed)
    raise ConfigError(*found)


def nats_section(servers: Sequence[str] | None, context: str | None) -> NatsConfig:
    """Return the `nats` section for command line options. Raises ConfigError."""
    data = {"servers": servers or None, "context": context}
    try:
        return NatsConfig.model_validate(data)
    except ValidationError as error:
        found = problems(error, NatsConfig)
    raise ConfigError(*(f"--{problem}" for problem in found))


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file, for editors; it allows `${ENV}` wherever the file does."""
    generated = Config.model_json_schema(schema_generator=_SchemaGenerator)
    for section in (generated, *generated["$defs"].values()):
        section["properties"] = {name: _or_variable(setting) for name, setting in section["properties"].items()}
    return {"$schema": GenerateJsonSchema.schema_dialect, **generated, "title": "jetcapture configuration"}


class _SchemaGenerator(GenerateJsonSchema):
    """A schema without titles, which would only repeat the settings' names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  # the base class's signature
        return False


def _or_variable(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting's schema, widened to text with a variable in it where it does not allow any text as it is."""
    choices = setting.get("anyOf", [setting])
    plain = any(
        choice.get("type") == "string" and not choice.keys() & {"enum", "const", "pattern"} for choice in choices
    )
    if plain or any(choice.get("type") in ("object", "array") or "$ref" in choice for choice in choices):
        return setting
    about: dict[str, Any] = {name: setting[name] for name in ("description", "default") if name in setting}
    rules = {name: value for name, value in setting.items() if name not in about}
    options = rules.get("anyOf", [rules])
    return {**about, "anyOf": [*options, {"type": "string", "pattern": r"\$\{"}]}


def read_text(path: Path, what: str) -> str:
    """Return a file's text. Raises ConfigError that starts with `what`."""
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except ValueError:
        reason = "cannot be read: it is not UTF-8 text"
    raise ConfigError(f"{what}: {reason}")
