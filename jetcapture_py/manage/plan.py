"""Plan the changes that make the stream and the consumer as configured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jetcapture_py.config.buckets import new_stream
from jetcapture_py.config.model import Managed, SourceConfig
from jetcapture_py.config.stream import StreamSection, api_values
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.admin import consumer_state, differences, unusable, wanted_config
from jetcapture_py.jetstream.connection import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.settings import Difference, differing, normal
from jetcapture_py.manage.rules import ConsumerChange, Server, StoredMessages, consumer_refusal, stream_refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A setting's old and new value, None if not set; `refusal` is the reason why it cannot be changed."""

    name: str
    old: Any
    new: Any
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The changes to a stream or consumer. `request` is the whole configuration to request from the server.

    `wanted` are the configured settings only. `refusal` is a reason that is not about a single setting.
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update", "none"]
    changes: tuple[SettingChange, ...]
    request: dict[str, Any]
    wanted: dict[str, Any]
    refusal: str | None = None

    @property
    def possible(self) -> bool:
        """Whether nothing is refused."""
        return self.refusal is None and not any(change.refusal for change in self.changes)


async def plans(session: ReadSession, managed: Managed) -> list[Plan]:
    """Return the plans, the stream's first. Raises SourceError."""
    name = managed.stream_name
    answer = await info_or_none(session, f"STREAM.INFO.{name}", STREAM_NOT_FOUND)
    server = await _server(session, answer)
    planned = []
    if managed.stream is not None:
        planned.append(await _stream_plan(session, managed, managed.stream, answer, server))
    elif answer is None:
        raise SourceError(f"stream {name} does not exist, and there is no section stream to create it from")
    if managed.source is not None:
        settings = planned[0].request if planned else answer["config"] if answer else {}
        planned.append(await _consumer_plan(session, managed.source, server, answer, settings))
    return planned


async def info_or_none(session: ReadSession, subject: str, missing: int) -> dict[str, Any] | None:
    """Return the answer of the JetStream API, None for the error `missing`. Raises SourceError."""
    try:
        return await session.request(subject)
    except SourceError as error:
        if isinstance(error.__cause__, ApiError) and error.__cause__.err_code == missing:
            return None
        raise


async def _server(session: ReadSession, answer: Mapping[str, Any] | None) -> Server:
    """Describe the connected server; for a new stream, it may be part of a cluster."""
    clustered = answer is None or bool((answer.get("cluster") or {}).get("name"))
    return Server(version=session.connection.server_version, clustered=clustered)


async def _stream_plan(
    session: ReadSession, managed: Managed, section: StreamSection, answer: Mapping[str, Any] | None, server: Server
) -> Plan:
    name, source = managed.stream_name, managed.source
    defaults = new_stream(*source.holds) if source is not None and source.holds is not None else {}
    wanted = {**api_values(section), "name": name}
    if answer is None:
        given = {**defaults, **wanted}
        given = {setting: value for setting, value in given.items() if value is not None}
        changes = [
            SettingChange(name=setting, old=None, new=value, refusal=server.too_old_for(setting, value))
            for setting, value in given.items()
            if setting != "name"
        ]
        return Plan(kind="stream", name=name, action="create", changes=tuple(changes), request=given, wanted=wanted)
    actual = answer["config"]
    differ = differing(wanted, actual)
    request = _overlaid(actual, wanted, differ)
    stored = await _stored(session, name, answer, differ)
    changes = [
        SettingChange(
            name=each.name,
            old=each.actual,
            new=each.wanted,
            refusal=stream_refusal(each, request, server) or stored.deleted_by(each, request),
        )
        for each in differ
    ]
    return Plan(
        kind="stream",
        name=name,
        action="update" if changes else "none",
        changes=tuple(changes),
        request=request,
        wanted=wanted,
    )


async def _stored(
    session: ReadSession, name: str, answer: Mapping[str, Any], differ: list[Difference]
) -> StoredMessages:
    """Return what the stream holds; count messages by subject only if needed."""
    most = 0
    if any(each.name == "max_msgs_per_subject" for each in differ):
        async for counts in _counts(session, name):
            most = max(most, *counts.values(), 0)
    return StoredMessages.of(answer, most)


async def _counts(session: ReadSession, name: str) -> AsyncIterator[dict[str, int]]:
    """Yield the numbers of stored messages by subject, in parts."""
    offset, total = 0, 1
    while offset < total:
        page = await session.request(f"STREAM.INFO.{name}", {"subjects_filter": ">", "offset": offset})
        counts = page["state"].get("subjects") or {}
        yield counts
        offset, total = offset + max(len(counts), 1), page.get("total", 0)


async def _consumer_plan(
    session: ReadSession,
    source: SourceConfig,
    server: Server,
    stream: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> Plan:
    """Plan the consumer; `settings` are those that the stream then has."""
    name = source.consumer
    wanted = wanted_config(source)
    subject = f"CONSUMER.INFO.{source.stream}.{name}"
    answer = None if stream is None else await info_or_none(session, subject, CONSUMER_NOT_FOUND)
    if stream is None or answer is None:
        changes = [
            SettingChange(name=setting, old=None, new=value, refusal=server.too_old_for(setting, value))
            for setting, value in wanted.items()
            if setting not in ("name", "durable_name") and normal(setting, value) is not None
        ]
        return Plan(kind="consumer", name=name, action="create", changes=tuple(changes), request=wanted, wanted=wanted)
    actual = answer["config"]
    differ = differences(source, actual)
    request = _overlaid(actual, wanted, differ)
    setting, deletes = await _deleted(session, stream, settings, answer, request, differ)
    changes = [
        SettingChange(
            name=each.name,
            old=each.actual,
            new=each.wanted,
            refusal=consumer_refusal(each, actual, server) or (deletes if setting in ("", each.name) else None),
        )
        for each in differ
    ]
    return Plan(
        kind="consumer",
        name=name,
        action="update" if changes else "none",
        changes=tuple(changes),
        request=request,
        wanted=wanted,
        refusal=unusable(source.stream, name, actual),
    )


async def _deleted(
    session: ReadSession,
    stream: Mapping[str, Any],
    settings: Mapping[str, Any],
    consumer: Mapping[str, Any],
    request: Mapping[str, Any],
    differ: list[Difference],
) -> tuple[str, str | None]:
    """Return the setting of the consumer that would delete stored messages, "" if any would, and why it is refused."""
    retention = settings.get("retention", "limits")
    filters = any(each.name == "filter_subjects" for each in differ)
    if (
        not differ
        or not stream["state"]["messages"]
        or not (retention == "interest" or (retention == "workqueue" and filters))
    ):
        return "", None
    name = stream["config"]["name"]
    change = ConsumerChange(stream, settings, consumer_state(dict(consumer)), request)
    offset, total = 0, 1
    while offset < total:
        page = await session.request(f"CONSUMER.LIST.{name}", {"offset": offset})
        others = page.get("consumers") or ()
        for other in others:
            if other["name"] != consumer["name"]:
                change.add_consumer(other)
        offset, total = offset + max(len(others), 1), page.get("total", 0)
    async for counts in _counts(session, name):
        for subject, count in counts.items():
            change.add(subject, count)
    return change.refusal(differ) or ("", None)


def _overlaid(actual: Mapping[str, Any], wanted: Mapping[str, Any], changes: Iterable[Difference]) -> dict[str, Any]:
    """Return the server's configuration with the changes applied; None removes a setting."""
    request = dict(actual)
    for change in changes:
        name = change.name.partition(".")[0]
        request[name] = wanted[name] if name == "metadata" else change.wanted
        if name == "filter_subjects":
            request.pop("filter_subject", None)
    return {name: value for name, value in request.items() if value is not None}
