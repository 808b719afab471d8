"""The stream and the consumer on the server: created when missing, otherwise taken as they are, and looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jetcapture_py.config.buckets import bucket_of
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.config.stream import api_values
from jetcapture_py.config.units import format_time
from jetcapture_py.errors import MissingStreamError, SourceError
from jetcapture_py.jetstream.connection import (
    CONSUMER_NOT_FOUND,
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    Api,
    ApiError,
    UnavailableError,
)
from jetcapture_py.jetstream.settings import Difference, differing

_CONSUMER_EXISTS = (10148, 10105)
_NANOSECOND = 1_000_000_000
_ACK_ATTEMPTS, _ACK_PAUSE = 4, 0.25
"""A consumer without a leader receives nothing for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerState:
    """What the server says of the consumer. Times in seconds, sizes in bytes, 0 where the server sets no limit.

    `pending` messages wait to be delivered, `unacked` are delivered and not acknowledged, to whatever replica. Of the
    stream's messages up to sequence `ack_floor` none is either. `asked` is the server's time of the answer. `delivered`
    is the last sequence that was, `deliveries` counts every delivery and `acknowledged` those up to the ack floor,
    `redelivered` how many of the unacked ones were delivered more than once, and `waiting_pulls` is how many pulls are
    open, of whatever replica. `created` tells a consumer from the one before it of the same name, as the server writes
    it. `last_ack` is when a message was last acknowledged; None where the server does not know, as after a restart.
    """

    config: dict[str, Any]
    pending: int
    unacked: int
    ack_wait: float
    max_ack_pending: int
    max_waiting: int
    max_batch: int
    max_bytes: int
    max_expires: float
    ack_floor: int
    asked: datetime
    delivered: int = 0
    acknowledged: int = 0
    deliveries: int = 0
    redelivered: int = 0
    waiting_pulls: int = 0
    paused: bool = False
    created: str = ""
    last_ack: datetime | None = None


def consumer_state(info: dict[str, Any]) -> ConsumerState:
    """Read the server's answer to CONSUMER.INFO or CONSUMER.CREATE."""
    config = info["config"]
    waits = [config.get("ack_wait", 30 * _NANOSECOND), *config.get("backoff", [])]
    unlimited = 1 << 62
    max_ack_pending = config.get("max_ack_pending", 1000)
    return ConsumerState(
        config=config,
        pending=info.get("num_pending", 0),
        unacked=info.get("num_ack_pending", 0),
        ack_wait=min(wait for wait in waits if wait > 0) / _NANOSECOND,
        max_ack_pending=max_ack_pending if max_ack_pending > 0 else unlimited,
        max_waiting=max(0, config.get("max_waiting", 0)),
        max_batch=config.get("max_batch", 0),
        max_bytes=config.get("max_bytes", 0),
        max_expires=config.get("max_expires", 0) / _NANOSECOND,
        ack_floor=info.get("ack_floor", {}).get("stream_seq", 0),
        asked=datetime.fromisoformat(info["ts"]) if "ts" in info else datetime.now(UTC),
        delivered=info.get("delivered", {}).get("stream_seq", 0),
        acknowledged=info.get("ack_floor", {}).get("consumer_seq", 0),
        deliveries=info.get("delivered", {}).get("consumer_seq", 0),
        redelivered=info.get("num_redelivered", 0),
        waiting_pulls=info.get("num_waiting", 0),
        paused=bool(info.get("paused")),
        created=info.get("created", ""),
        last_ack=datetime.fromisoformat(acked) if (acked := info.get("ack_floor", {}).get("last_active")) else None,
    )


async def get_consumer(api: Api, stream: str, consumer: str) -> ConsumerState:
    """The consumer's state now. Raises SourceError when it or its stream does not exist, UnavailableError otherwise."""
    try:
        return consumer_state(await api.request(f"CONSUMER.INFO.{stream}.{consumer}"))
    except ApiError as error:
        if error.err_code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
            raise UnavailableError(str(error)) from error
        raise _translated(error, stream, consumer) from error


async def stream_created(api: Api, stream: str) -> str:
    """When the stream was created, RFC 3339; "" when we are not allowed to ask."""
    try:
        return str((await api.request(f"STREAM.INFO.{stream}")).get("created", ""))
    except ApiError as error:
        if error.err_code == STREAM_NOT_FOUND:
            raise _translated(error, stream, "") from error
        return ""


def filters_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The subjects that a consumer of this configuration selects, as the JetStream API spells it; none: all."""
    one = config.get("filter_subject")
    return (one,) if one else tuple(config.get("filter_subjects", ()))


async def first_time(api: Api, stream: str, seq: int, filters: Sequence[str]) -> datetime | None:
    """When the first message from sequence `seq` on that a filter matches was stored; None when there is none.

    Raises UnavailableError when nobody answers, or we are not allowed to ask.
    """
    found = []
    for subject in filters or (">",):
        try:
            answer = await api.request(f"STREAM.MSG.GET.{stream}", {"seq": seq, "next_by_subj": subject})
        except ApiError as error:
            if error.err_code != MESSAGE_NOT_FOUND:
                raise UnavailableError(str(error)) from error
            continue
        found.append((answer["message"]["seq"], datetime.fromisoformat(answer["message"]["time"])))
    return min(found)[1] if found else None


async def ensure_consumer(api: Api, source: SourceConfig) -> ConsumerState:
    """The durable consumer, created when it is missing and `source.create` is set. Raises SourceError."""
    stream, consumer = source.stream, source.consumer
    try:
        state = consumer_state(await api.request(f"CONSUMER.INFO.{stream}.{consumer}"))
    except ApiError as error:
        if error.err_code != CONSUMER_NOT_FOUND or not source.create:
            raise _translated(error, stream, consumer) from error
        state = await _create(api, source)
    if problem := unusable(stream, consumer, state.config):
        raise SourceError(problem)
    return state


async def check_acks(api: Api, stream: str, consumer: str) -> None:
    """Check that acknowledgements reach the consumer, if its API is imported. Raises SourceError."""
    for _ in range(_ACK_ATTEMPTS if api.imported else 0):
        if await api.receives_acks(stream, consumer):
            return
        await asyncio.sleep(_ACK_PAUSE)
    if api.imported:
        raise SourceError(
            f"nobody receives the acknowledgements of consumer {consumer} of stream {stream}; "
            "import the service $JS.ACK.> from the account that has the stream"
        )


def unusable(stream: str, consumer: str, config: Mapping[str, Any]) -> str | None:
    """Why a consumer of this configuration cannot be captured from, in one line; None when it can."""
    where = f"consumer {consumer} of stream {stream}"
    if config.get("deliver_subject"):
        return f"{where} is a push consumer; a pull consumer is required"
    if config.get("ack_policy") != "explicit":
        return (
            f"{where} has ack_policy {config.get('ack_policy')}; explicit is required, "
            "or messages count as handled before they are stored"
        )
    if config.get("priority_policy", "none") != "none":
        return f"{where} has priority groups ({config['priority_policy']}); jetcapture pulls without a group"
    if config.get("headers_only"):
        return f"{where} has headers_only set; it must be off, or messages are delivered without their payload"
    return None


async def _create(api: Api, source: SourceConfig) -> ConsumerState:
    stream, consumer = source.stream, source.consumer
    request = {"stream_name": stream, "config": wanted_config(source), "action": "create"}
    try:
        return consumer_state(await api.request(f"CONSUMER.CREATE.{stream}.{consumer}", request))
    except ApiError as error:
        if error.err_code in _CONSUMER_EXISTS:  # another replica was faster, with other settings
            return await get_consumer(api, stream, consumer)
        raise _translated(error, stream, consumer) from error


def wanted_config(source: SourceConfig) -> dict[str, Any]:
    """The consumer's configuration as the JetStream API spells it (ADR-13); durations in nanoseconds."""
    config: dict[str, Any] = {
        "name": source.consumer,
        "durable_name": source.consumer,
        "deliver_policy": source.deliver_policy,
        "ack_policy": "explicit",
        "ack_wait": round(source.ack_wait * _NANOSECOND),
        "max_deliver": -1,
        "max_ack_pending": source.max_ack_pending,
        "replay_policy": source.replay_policy,
    }
    if source.start_sequence is not None:
        config["opt_start_seq"] = source.start_sequence
    if source.start_time is not None:
        config["opt_start_time"] = format_time(source.start_time)
    if len(source.filter_subjects) == 1:
        config["filter_subject"] = source.filter_subjects[0]
    elif source.filter_subjects:
        config["filter_subjects"] = list(source.filter_subjects)
    elif source.deliver_policy == "last_per_subject":
        config["filter_subject"] = ">"  # the server must know of which subjects
    if source.consumer_config is not None:
        config |= {name: value for name, value in api_values(source.consumer_config).items() if value is not None}
    if config.get("backoff"):
        config["ack_wait"] = config["backoff"][0]  # as the server has it then
    return config


def differences(source: SourceConfig, actual: Mapping[str, Any]) -> list[Difference]:
    """Settings of the consumer whose value on the server, `actual`, is not the configured one."""
    wanted = wanted_config(source)
    for config in (wanted, actual := dict(actual)):
        config["filter_subjects"] = filters_of(config)
        config.pop("filter_subject", None)
        if "opt_start_time" in config:
            config["opt_start_time"] = _to_the_microsecond(config["opt_start_time"])
    return differing(wanted, actual)


def _to_the_microsecond(text: str) -> str:
    """A time as `source.start_time` holds it, which has no more digits."""
    try:
        return format_time(datetime.fromisoformat(text))
    except ValueError:
        return text


def _translated(error: ApiError, stream: str, consumer: str) -> SourceError:
    if error.err_code == STREAM_NOT_FOUND:
        setting, _ = bucket_of(stream) or ("stream", "")
        return MissingStreamError(f"stream {stream} does not exist; create it, or correct source.{setting}")
    if error.err_code == CONSUMER_NOT_FOUND:
        return SourceError(f"consumer {consumer} does not exist on stream {stream}")
    return SourceError(f"the server refused the request for consumer {consumer} on stream {stream}: {error}")
