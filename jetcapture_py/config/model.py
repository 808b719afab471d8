"""The configuration: one YAML file, checked whole before anything starts. Nothing else reads the environment.

`load` returns a `Config` or raises `ConfigError` with one line per problem. A setting without a value (`user:`) counts
as missing. Durations are seconds as float, sizes bytes as int; see `units` for how they are written, and `yaml_text`
for environment variables. Secrets are never part of a message or a repr.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import GenerateJsonSchema

from jetcapture_py.config import buckets, yaml_text
from jetcapture_py.config import values as types
from jetcapture_py.config.block import BlockConfig as BlockConfig
from jetcapture_py.config.decoding import Column as Column
from jetcapture_py.config.decoding import DecodeConfig
from jetcapture_py.config.maintain import MaintainConfig
from jetcapture_py.config.nats import NatsConfig as NatsConfig
from jetcapture_py.config.nats import TlsConfig as TlsConfig
from jetcapture_py.config.section import Section as Section
from jetcapture_py.config.section import setting, validated, wrong
from jetcapture_py.config.stream import ConsumerSection, StreamSection
from jetcapture_py.config.subjects import covers
from jetcapture_py.config.units import kind, quoted
from jetcapture_py.errors import ConfigError

MANY_UNACKED = 100_000
TOO_MANY_UNACKED = 300_000
"""Above this the server, whose redelivery time grows with the square of the unacked messages, stalls for minutes."""


MANY = ("streams", "buckets")
"""Settings of `source` that select many streams."""
PLACEHOLDER = "{stream}"
_OF_STREAM = (
    ("store", "url"),
    ("maintain", "table", "name"),
    ("maintain", "table", "quarantine"),
    ("maintain", "table", "location"),
    ("maintain", "table", "latest", "name"),
)
"""Settings in which `{stream}` is replaced."""
_PLAIN_NAME = re.compile(r"[\w$-]+")
"""Names of streams that are safe in every address and table name."""


def _named_in_one_way(section: dict[str, Any]) -> None:
    """Say in the JSON Schema that one of three settings names the stream, or patterns select many."""
    section["required"].remove("stream")
    one = [{"required": [name]} for name in ("stream", *buckets.PREFIXES)]
    section["oneOf"] = [*one, {"anyOf": [{"required": [name]} for name in MANY]}]


def _stream_of(source: object) -> str:
    """Return the stream that `source` names; "_" or similar if invalid, which is an error later."""
    settings = source if isinstance(source, dict) else {}
    for store, prefix in buckets.PREFIXES.items():
        if (name := settings.get(store)) is not None:
            return f"{prefix}{name if isinstance(name, str) and buckets.is_name(name) else '_'}"
    stream = settings.get("stream")
    return stream if isinstance(stream, str) and types.is_stream_name(stream) else "_"


def _replaced(data: dict[str, Any], path: Sequence[str], stream: str, whole: str) -> dict[str, Any]:
    """Return the settings with `{stream}` replaced at `path`. Raises an error for a validator."""
    name, *rest = path
    value = data.get(name)
    if isinstance(value, dict) and rest:
        return {**data, name: _replaced(value, rest, stream, whole)}
    if rest or not isinstance(value, str) or PLACEHOLDER not in value:
        return data
    if not _PLAIN_NAME.fullmatch(stream):
        other = "characters other than letters, digits, _, - and $; give this stream a configuration of its own"
        raise wrong(whole, f"{PLACEHOLDER} cannot stand for {quoted(stream)}, which has {other}")
    return {**data, name: value.replace(PLACEHOLDER, stream)}


class SourceConfig(Section):
    """The JetStream consumer that messages come from. `stream` is also set for a bucket or an object store."""

    model_config = ConfigDict(json_schema_extra=_named_in_one_way)

    stream: types.StreamName = Field(
        description="Stream to capture; required unless `bucket`, `object_store`, `streams` or `buckets` is set."
    )
    bucket: types.BucketName | None = setting(
        "Key-value bucket to capture, in place of `stream`: adds the columns `key_name`, `operation` and `revision`."
    )
    object_store: types.BucketName | None = setting("Object store to capture, in place of `stream`.")
    streams: tuple[types.StreamPattern, ...] = setting(
        "Streams to capture in place of `stream`, now and later, each with the other settings: names, patterns such as "
        "`orders-*`, and, after `!`, exceptions.",
        default=(),
    )
    buckets: tuple[types.StreamPattern, ...] = setting(
        "Key-value buckets and object stores to capture, in the same way.", default=()
    )
    max_streams: types.Count = setting("Maximum number of captures of `streams` and `buckets`.", default=100)
    consumer: types.Name = Field(description="Durable pull consumer, shared by all replicas.")
    mode: Literal["shared", "ordered"] = setting(
        "`shared`: all replicas receive. `ordered`: one does, faster, and the others stand by (2.14).",
        default="shared",
    )
    takeover: types.DurationOfSeconds | None = setting(
        "How long the active replica may be silent before another takes over (default 1s); only with `mode: ordered`."
    )
    create: bool = setting("Create the consumer if it is missing; an existing one is used as it is.", default=True)
    filter_subjects: tuple[types.FilterSubject, ...] = setting("Subjects to capture; empty means all.", default=())
    deliver_policy: Literal["all", "last", "last_per_subject", "new", "by_start_sequence", "by_start_time"] = setting(
        "Where a new consumer starts.", default="all"
    )
    start_sequence: types.Count | None = setting("First sequence; only with `by_start_sequence`.")
    start_time: types.StartTime | None = setting("First time, RFC 3339; only with `by_start_time`.")
    replay_policy: Literal["instant", "original"] = setting(
        "Speed of delivery for stored messages: immediate, or the pace they arrived at.", default="instant"
    )
    ack_wait: types.DurationOfSeconds = setting(
        "How long the server waits before it redelivers a message; may be shorter than a block's age.", default="2m"
    )
    max_ack_pending: types.Count = setting(
        "Maximum number of messages delivered and not yet acknowledged, over all replicas.", default=50_000
    )
    allow_many_unacked: bool = setting(f"Allow `max_ack_pending` above {TOO_MANY_UNACKED:,}.", default=False)
    batch: types.Count = setting("Messages that one pull asks for.", default=5_000)
    consumer_config: ConsumerSection | None = setting(
        "Further settings of the consumer, for a new one and for `jetcapture apply`."
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
        return {**data, "stream": _stream_of(data)} if given and given[0] != "stream" else data

    @property
    def holds(self) -> tuple[str, str] | None:
        """The setting `bucket` or `object_store` and its value; None with `stream`."""
        given = {store: name for store in buckets.PREFIXES if (name := getattr(self, store)) is not None}
        return next(iter(given.items()), None)

    @property
    def default_key(self) -> str:
        """The key template without the setting `key`."""
        return "{subject[0]}" if self.holds is None else buckets.DEFAULT_KEYS[self.holds[0]]

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
                f"expected at most {TOO_MANY_UNACKED}; {reason}; source.allow_many_unacked: true allows it",
            )
        if self.mode == "ordered":
            self._ordered()
        elif self.takeover is not None:
            raise wrong("takeover", "only with mode ordered")
        if self.consumer_config and self.consumer_config.backoff and "ack_wait" in self.model_fields_set:
            raise wrong("ack_wait", "cannot be combined with consumer_config.backoff, which replaces it")
        return self

    def _ordered(self) -> None:
        """Refuse settings that do not work with cumulative acknowledgements."""
        further = self.consumer_config or ConsumerSection()
        if "ack_wait" in self.model_fields_set:
            raise wrong("ack_wait", "only with mode shared: with ordered, nothing is redelivered for being held long")
        if self.deliver_policy == "last_per_subject":
            raise wrong("deliver_policy", "last_per_subject only with mode shared, not with ordered")
        if further.backoff:
            raise wrong("consumer_config.backoff", "only with mode shared, not with ordered")
        if (further.max_deliver or 0) > 0:
            raise wrong("consumer_config.max_deliver", "only with mode shared: with ordered, it must be unlimited")


class StoreConfig(Section):
    """Where objects are stored."""

    type: types.Reference | None = setting(
        "Your own store, called with `url` and `options`: `package.module:object`. Default: by `url`."
    )
    url: types.StoreUrl = Field(
        description="Absolute path, file:///, s3://, abfs://, az://, gs:// or memory://; may contain `{key}` and "
        "`{stream}`. With `type`, any address."
    )
    options: types.Options = Field(
        default_factory=dict, repr=False, exclude=True, description="Passed to the driver; never printed or logged."
    )
    driver: Literal["fsspec", "obstore"] = setting(
        "Library that reaches the store, each with `options` of its own: `fsspec`, or `obstore` (extra `fast`) for S3, "
        "Azure and, which needs it, `gs://`.",
        default="fsspec",
    )
    concurrency: types.Count = setting("Objects stored at the same time.", default=4)
    retry_for: types.RetryFor = setting(
        "How long a failing store is retried before the process exits with an error.", default="forever"
    )

    @model_validator(mode="after")
    def _driven(self) -> Self:
        if self.type and "driver" in self.model_fields_set:
            raise wrong("driver", "cannot be combined with type")
        if self.driver == "obstore":  # so that the URL and the options suffice to open the store
            self.options["driver"] = self.driver
        return self


class OnStoredConfig(Section):
    """Notifications of stored objects, sent after their messages are acknowledged."""

    subject: types.SubjectTemplate | None = setting(
        "Subject to publish a JSON message to for each object; may contain `{stream}`."
    )
    call: types.Reference | None = setting("Your own function, called for each object: `package.module:function`.")


class SpoolConfig(Section):
    """Space on local disk for open blocks."""

    path: types.FilePath = Field(description="Directory on a local disk; its files have no names.")
    size: types.Size = Field(
        description="Maximum size of all its files; half is for rows, the rest for the objects written from them."
    )


class LimitsConfig(Section):
    """Limits of the capture."""

    memory: types.Memory = setting("Memory for messages that are not stored yet; at least 32MiB.", default="1GiB")
    open_blocks: types.Count = setting(
        "Blocks open at the same time; above this the largest are sealed.", default=1_000
    )
    spool: SpoolConfig | None = setting(
        "Local disk to move rows to when they exceed the memory, before blocks are sealed early."
    )


def _or_null(setting: dict[str, Any]) -> None:
    """Allow null in a setting's JSON Schema."""
    setting["anyOf"] = [{"type": setting.pop("type")}, {"type": "null"}]


class HttpConfig(Section):
    """Metrics, probes and status page of the running process."""

    listen: types.Listen = setting(
        "Address and port of /metrics, /livez, /readyz and the status page; `:8080`: all addresses; `null`: off.",
        default="127.0.0.1:8080",
        json_schema_extra=_or_null,
    )


class LogConfig(Section):
    """Logging."""

    format: Literal["auto", "text", "json"] = setting(
        "`auto` is text on a terminal and JSON elsewhere.", default="auto"
    )
    level: Literal["debug", "info", "warning", "error"] = setting("Lowest level that is logged.", default="info")


def same_stream(stream: StreamSection | None, source: SourceConfig | None) -> None:
    """Raise an error for a validator when the two sections name different streams."""
    if stream is not None and source is not None and stream.name not in (None, source.stream):
        name, _ = source.holds or ("stream", "")
        raise wrong("stream.name", f"expected {source.stream}, as in source.{name}")


class Config(Section):
    """The configuration of one capture."""

    keeps_null = frozenset({"key", "http"})

    nats: NatsConfig = Field(default_factory=NatsConfig, description="Connection to NATS.")
    stream: StreamSection | None = setting(
        "The stream, for `jetcapture apply` and `jetcapture check`. What is left out stays as it is on the "
        "server. Names are those of the JetStream API."
    )
    source: SourceConfig = Field(description="Where messages come from.")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="How messages become columns.")
    key: types.Template = Field(
        default_factory=lambda data: data["source"].default_key if "source" in data else "",  # it may be wrong
        description='A template such as "{subject[1]}", "{header.X-Tenant}", "{region}" or "{stream}", "" for one key '
        "(default with `source.bucket`), or your own function: `package.module:function`. A message without such a "
        "part has no key, and an empty key is none. With `source.object_store`, the default is `{subject[2]}`: "
        "metadata and contents apart.",
    )
    block: BlockConfig = Field(default_factory=BlockConfig, description="When a block is sealed.")
    store: StoreConfig = Field(description="Where objects are stored.")
    on_stored: OnStoredConfig = Field(default_factory=OnStoredConfig, description="Notifications of stored objects.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="Limits of the capture.")
    http: HttpConfig | None = Field(
        default_factory=HttpConfig, description="Metrics, probes and status page; `null` turns them off."
    )
    log: LogConfig = Field(default_factory=LogConfig, description="Logging.")
    maintain: MaintainConfig | None = setting("What `jetcapture maintain` does.")
    drain_timeout: types.Duration = setting(
        "Time to store and acknowledge held messages when the process stops.", default="60s"
    )

    @field_validator("http", mode="before")
    @classmethod
    def _off(cls, http: object) -> object:
        """Turn `http` off for `listen: null`."""
        return None if http == {"listen": None} else http

    @model_validator(mode="before")
    @classmethod
    def _of_its_stream(cls, data: object) -> object:
        """Replace `{stream}`, except in `key` and `on_stored.subject`, which are parsed earlier."""
        if isinstance(data, dict):
            stream = _stream_of(data.get("source"))
            for path in _OF_STREAM:
                data = _replaced(data, path, stream, ".".join(path))
        return data

    @model_validator(mode="before")
    @classmethod
    def _text_without_payloads(cls, data: object) -> object:
        """Turn `decode.keep_payload` off by default if `block.format` is a text format."""
        if not isinstance(data, dict):
            return data
        block, decode = data.get("block"), data.get("decode") or {}
        if not isinstance(block, dict) or block.get("format") not in types.TEXT_FORMATS:
            return data
        if not isinstance(decode, dict) or decode.get("keep_payload") is not None:
            return data
        if decode.get("format", "raw") == "raw":
            raise ValueError(
                f"decode.keep_payload: with decode.format raw and block.format {block['format']}, set it to true: "
                "nothing of a message would be kept"
            )
        return {**data, "decode": {**decode, "keep_payload": False}}

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.source.object_store is not None and self.decode.format != "raw":
            raise wrong("decode.format", "only raw with source.object_store, whose messages are parts of files")
        field = self.block.time != "timestamp" and not self.block.time.startswith("header.")
        if self.source.bucket is not None and field and self.block.time_fallback is None:
            raise wrong(
                "block.time_fallback",
                "required with source.bucket and a field: deletions have none, so set it to timestamp",
            )
        same_stream(self.stream, self.source)
        if self.block.bundles and "{key}" in self.store.url:
            raise wrong("store.url", "cannot contain {key} with block.bundles, whose objects have many keys each")
        if self.maintain is not None and self.maintain.table is not None and "{key}" in self.store.url:
            raise wrong("maintain.table", "not with {key} in store.url: a table is of one archive")
        if self.maintain is not None and self.maintain.table is not None and self.block.format in types.TEXT_FORMATS:
            raise wrong("maintain.table", f"not with block.format {self.block.format}: a table requires Parquet")
        if self.maintain is not None and self.maintain.table is not None and self.store.url.startswith("gs://"):
            login = any(name.startswith("gcs.") for name in self.maintain.table.catalog)
            if self.store.options.keys() - {"driver"} and not login:
                reason = "PyIceberg does not know store.options of gs://"
                raise wrong("maintain.table.catalog", f"{reason}: add its own here, such as gcs.oauth2.token")
        latest = self.maintain and self.maintain.table and self.maintain.table.latest
        if latest and self.maintain and self.maintain.keep is not None and self.block.time != "timestamp":
            reason = "not with maintain.keep and block.time: a key's newest message may go before an older one"
            raise wrong("maintain.table.latest", reason)
        if self.maintain is not None and "{key}" in self.store.url:
            raise wrong("maintain", "cannot be combined with {key} in store.url, which makes an archive of each key")
        return self

    @model_validator(mode="after")
    def _no_loop(self) -> Self:
        subject = self.stored_subject
        if subject.startswith(("$JS.", "$SYS.")):
            raise wrong("on_stored.subject", "expected a subject that is not the server's own")
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
            raise wrong("limits.spool.path", "expected a directory outside of the archive")
        return self

    @property
    def stored_subject(self) -> str:
        """The subject of `on_stored`; "" without one."""
        return (self.on_stored.subject or "").replace(PLACEHOLDER, self.source.stream)

    def warnings(self) -> tuple[str, ...]:
        """Return one line per setting that works but is likely to cause trouble."""
        if (unacked := self.source.max_ack_pending) <= MANY_UNACKED:
            return ()
        line = (
            f"source.max_ack_pending: {unacked} is above {MANY_UNACKED}; after a crash the server's time to redeliver "
            "grows with the square of the unacked messages"
        )
        return (line,)


def load(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration from a file. Raises ConfigError with one line per problem."""
    return loads(read_text(Path(path), os.fspath(path)), env)


def loads(text: str, env: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration from YAML text. Raises ConfigError with one line per problem."""
    return parse(yaml_text.read(text, env), env, text)


def parse(data: object, env: Mapping[str, str] = os.environ, text: str | None = None) -> Config:
    """Read the configuration from plain values, as parsed from YAML. Raises ConfigError.

    `env` locates the contexts of the NATS CLI; messages quote the file's `text`.
    """
    return validated(Config, _of_one(data), env=env, text=text)


def is_of_many(data: Mapping[str, Any]) -> bool:
    """Whether the settings of a file configure many captures."""
    source = data.get("source")
    return isinstance(source, dict) and any(source.get(name) is not None for name in MANY)


def _of_one(data: object) -> dict[str, Any]:
    """Return the settings. Raises ConfigError if they are not a mapping, or configure many captures."""
    if not isinstance(data, dict):
        raise ConfigError(f"expected a mapping of settings, got {kind(data)}")
    if is_of_many(data):
        many = next(name for name in MANY if data["source"].get(name) is not None)
        raise ConfigError(f"source.{many}: expected a configuration of one stream, or --stream to choose one of many")
    return data


def load_for_apply(path: Path) -> Config:
    """Read a file as `parse_for_apply` does."""
    text = read_text(path, str(path))
    return parse_for_apply(yaml_text.read(text, os.environ), os.environ, text)


def parse_for_apply(data: object, env: Mapping[str, str] = os.environ, text: str | None = None) -> Config:
    """Read the configuration for `jetcapture apply`: `store` may be missing, and with a named `stream` also `source`.

    Without a source, its consumer is "". Raises ConfigError.
    """
    if not isinstance(data, dict):
        return parse(data, env, text)
    data = {"store": {"url": "/"}, **data}
    if data.get("source") is not None:
        return parse(data, env, text)
    if not isinstance(stream := data.get("stream"), dict) or stream.get("name") is None:
        raise ConfigError("source: required, but not set (or set stream.name, to apply only a stream)")
    config = parse({**data, "source": {"stream": stream["name"], "consumer": "none"}}, env, text)
    return config.model_copy(update={"source": config.source.model_copy(update={"consumer": ""})})


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
    """Extend a setting's schema to text with a variable, unless it already allows any text."""
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
