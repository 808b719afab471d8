"""Check the server's side: clock, account, stream, consumer, filters, permissions. Findings are one line each."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import nats.errors
from rich.text import Text

from jetcapture_py.config.model import Config, SourceConfig
from jetcapture_py.config.subjects import overlaps
from jetcapture_py.config.units import format_duration, format_size
from jetcapture_py.errors import ApiError, DeniedError, SourceError
from jetcapture_py.jetstream.consumer import (
    WRONG_CLOCK,
    ConsumerState,
    consumer_config,
    deleted_when_idle,
    filters_of,
)
from jetcapture_py.jetstream.ordered_consumer import too_old, unsuitable
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.jetstream.unreadable import Notifier, notification_loop
from jetcapture_py.jetstream.wire.client import Denial, refusal
from jetcapture_py.manage.plan import plans
from jetcapture_py.text import duration, plural, size

Level = Literal["ok", "skipped", "warning", "problem"]
_STYLES = {"ok": "green", "skipped": "dim", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One line. A problem keeps a capture from working or loses messages; a warning should be fixed."""

    level: Level
    about: str
    text: str


@dataclass(slots=True)
class Findings:
    """All findings of a check, and the figures behind them."""

    items: list[CheckFinding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def ok(self, about: str, text: str) -> None:
        self.items.append(CheckFinding(level="ok", about=about, text=text))

    def skipped(self, about: str, text: str) -> None:
        """Record a check that could not be made."""
        self.items.append(CheckFinding(level="skipped", about=about, text=text))

    def warning(self, about: str, text: str) -> None:
        self.items.append(CheckFinding(level="warning", about=about, text=text))

    def problem(self, about: str, text: str) -> None:
        self.items.append(CheckFinding(level="problem", about=about, text=text))

    @property
    def problems(self) -> list[CheckFinding]:
        return [finding for finding in self.items if finding.level == "problem"]

    def fields(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"ok": not self.problems, "findings": list(map(asdict, self.items)), "figures": self.figures}

    def summary(self) -> str:
        """Return one line: the first problem or warning, and their number."""
        warnings = [finding for finding in self.items if finding.level == "warning"]
        parts = []
        for noun, findings in (("problem", self.problems), ("warning", warnings)):
            if findings:
                first = findings[0]
                parts.append(f"{plural(len(findings), noun)}: {first.about}: {first.text}")
        return "; ".join(parts) or "ok"

    def lines(self) -> Iterator[Text]:
        for finding in self.items:
            line = Text(finding.level.ljust(8), _STYLES[finding.level])
            line.append(f" {finding.about.ljust(12)} ", "default")
            line.append(finding.text, "default")
            yield line


DOUBTFUL_CLOCK = 5.0
"""Seconds between this machine's clock and the server's."""
SHORT_WAIT, DOUBTFUL_WAIT = 5.0, 15.0
"""Seconds of `ack_wait`: messages are kept alive every third of it, so a pause of the rest causes redeliveries."""
_ALMOST = 0.9
_ANSWER = 5.0
_NO_MESSAGE = 1 << 62
"""A sequence beyond any stream; the server does not answer acknowledgements of 0."""


def skips_messages(version: str) -> bool:
    """Whether consumers of such a server may skip messages."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return not (number >= (2, 15, 1) or (2, 14, 8) <= number < (2, 15))


async def check_account(session: ReadSession, findings: Findings) -> Mapping[str, Any] | None:
    """Check that JetStream answers, and the account's usage. Return the account, None if it does not answer."""
    before = datetime.now(UTC)
    try:
        account = await session.api.request("INFO")
    except DeniedError as error:
        findings.skipped("account", f"its limits cannot be read: {error}")
        return {}
    except ApiError as error:
        findings.problem("JetStream", f"{error}; enable JetStream for this account")
        return None
    except SourceError as error:
        findings.problem("JetStream", f"{error}; enable it on the server, or correct nats.domain or nats.api_prefix")
        return None
    version = session.connection.server_version
    findings.ok("JetStream", f"nats-server {version} answers in {(datetime.now(UTC) - before).total_seconds():.3f} s")
    if skips_messages(version):
        text = f"nats-server {version} can skip messages of a consumer, which the archive then lacks"
        findings.warning("server", f"{text} (nats-server#8623): use 2.14.8, 2.15.1 or newer")
    limits = account.get("limits") or {}
    for used, limit, what in (
        (account.get("storage", 0), limits.get("max_storage", -1), "file storage"),
        (account.get("memory", 0), limits.get("max_memory", -1), "memory storage"),
    ):
        if limit > 0 and used >= limit * _ALMOST:
            findings.problem(
                "account",
                f"{what} is nearly full, {size(used)} of {size(limit)}: publishers will be refused; raise the limit",
            )
    return account


def check_clock(findings: Findings, ahead: float) -> None:
    """Check how many seconds this machine's clock is ahead of the server's."""
    side = "ahead of" if ahead > 0 else "behind"
    text = f"this machine's clock is {duration(abs(ahead))} {side} the server's; synchronize both with NTP"
    if abs(ahead) >= WRONG_CLOCK:
        findings.problem("clock", text)
    elif abs(ahead) >= DOUBTFUL_CLOCK:
        findings.warning("clock", text)
    else:
        findings.ok("clock", f"within {max(abs(ahead), 0.1):.1f} s of the server's")


async def check_plans(session: ReadSession, config: Config, findings: Findings) -> None:
    """Compare stream and consumer with the configuration."""
    try:
        planned = await plans(session, config)
    except SourceError as error:
        text = f"{error}".replace("NATS refused: ", "")
        if not any(text in finding.text for finding in findings.problems):
            findings.problem("stream", text)
        return
    for plan in planned:
        where = f"{plan.kind} {plan.name}"
        names = ", ".join(change.setting for change in plan.changes)
        if plan.refusal:
            findings.problem(plan.kind, plan.refusal)
        elif plan.action == "create" and plan.kind == "stream":
            findings.problem(plan.kind, f"{where} does not exist; `jetcapture apply` creates it")
        elif plan.action == "create" and not config.source.create:
            findings.problem(
                plan.kind, f"{where} does not exist; `jetcapture apply` creates it, or source.create: true"
            )
        elif plan.action == "create":
            findings.ok(plan.kind, f"{where} does not exist yet; it will be created")
        elif plan.action == "update" and not plan.possible:
            fixed = ", ".join(change.setting for change in plan.changes if change.refusal)
            text = f"{where} differs in {names}; {fixed} cannot be changed in place"
            findings.warning(plan.kind, f"{text}: see `jetcapture apply --dry-run` for the reasons")
        elif plan.action == "update":
            findings.warning(plan.kind, f"{where} differs in {names}; see `jetcapture apply --dry-run`")
        else:
            findings.ok(plan.kind, f"{where} is as configured")


def check_wait(findings: Findings, consumer: ConsumerState | None, source: SourceConfig) -> None:
    """Check that messages can be kept alive; without a consumer, with the configured `ack_wait`."""
    wait = source.ack_wait if consumer is None else consumer.ack_wait
    pause = format_duration(round(wait * 2 / 3, 1))
    text = f"it is {format_duration(wait)}: a pause of {pause} causes redeliveries; set it to 30s or more"
    if wait < SHORT_WAIT:
        findings.problem("ack_wait", text)
    elif wait < DOUBTFUL_WAIT:
        findings.warning("ack_wait", text)


def check_mode(session: ReadSession, findings: Findings, source: SourceConfig, stream: Mapping[str, Any]) -> None:
    """Check that the server and the stream allow `source.mode: ordered`."""
    if source.mode == "ordered":
        problem = too_old(session.connection.server_version, imported=session.api.imported) or unsuitable(
            stream["config"]
        )
        if problem is not None:
            findings.problem("mode", problem)


FAST = 10_000
"""Messages per second from which halving the server's work for acks is worth a new consumer."""


def check_pays(findings: Findings, source: SourceConfig, stream: Mapping[str, Any], rate: float) -> None:
    """Recommend one active replica if that is faster."""
    if rate < FAST or source.mode == "ordered" or unsuitable(stream["config"]) is not None:
        return
    advice = "source.mode ordered receives up to twice as fast with 0.7 of the server's CPU, in one replica at a time"
    findings.ok("mode", f"at {rate:,.0f} messages/s, {advice}; split the subjects among several such captures for more")


def check_bucket(findings: Findings, source: SourceConfig, stream: Mapping[str, Any]) -> None:
    """Check whether a KV bucket keeps replaced entries until they are stored."""
    if source.bucket is None:
        return
    history = stream["config"].get("max_msgs_per_subject", -1)
    if history == 1:
        findings.warning(
            "bucket",
            "it keeps one entry per key: entries that are replaced before they are stored are lost if the capture is "
            "killed; give it more history",
        )
    else:
        findings.ok("bucket", f"it keeps {history if history > 0 else 'all'} entries per key")


def check_consumer(
    findings: Findings, source: SourceConfig, consumer: ConsumerState | None, stream: Mapping[str, Any]
) -> None:
    """Check the consumer for settings that lose messages or stop delivery."""
    settings = consumer_config(source) if consumer is None else consumer.config
    if settings.get("max_deliver", -1) > 0:
        text = f"after {settings['max_deliver']} deliveries the server gives up on a message, and the archive misses it"
        findings.warning("consumer", f"{text}; set max_deliver to unlimited")
    if deletion := deleted_when_idle(settings, stream["config"]):
        findings.warning("consumer", deletion)
    if consumer is not None and consumer.paused:
        findings.problem("consumer", f"it is paused until {settings.get('pause_until', 'later')}; resume it")


def check_limits(
    findings: Findings, config: Config, account: Mapping[str, Any], stream: Mapping[str, Any], *, new_consumer: bool
) -> None:
    """Check that limits of the account and the stream allow the consumer."""
    limits, settings = account.get("limits") or {}, stream["config"]
    configured = config.source.max_ack_pending
    for about, limit, whose in (
        ("account", limits.get("max_ack_pending", -1), "the account"),
        ("stream", (settings.get("consumer_limits") or {}).get("max_ack_pending", -1), "the stream's consumer_limits"),
    ):
        if 0 < limit < configured:
            findings.problem(
                about,
                f"{whose} allows a max_ack_pending of {limit}, source.max_ack_pending is {configured}; change one",
            )
    if not new_consumer:
        return
    for about, used, limit in (
        ("account", account.get("consumers", 0), limits.get("max_consumers", -1)),
        ("stream", stream["state"].get("consumer_count", 0), settings.get("max_consumers", -1)),
    ):
        if 0 < limit <= used:
            remedy = "delete an unused consumer, or raise max_consumers"
            findings.problem(about, f"the {about} allows {limit} consumers and has {used}; {remedy}")


async def check_work_queue(session: ReadSession, config: Config, findings: Findings, stream: Mapping[str, Any]) -> None:
    """Check that a work queue allows a new consumer: it starts at the beginning, and others take other subjects."""
    source = config.source
    if stream["config"].get("retention") != "workqueue":
        return
    if source.deliver_policy != "all":
        findings.problem(
            "stream", f"it is a work queue, which allows no deliver_policy {source.deliver_policy}; set it to all"
        )
    try:
        answer = await session.request(f"CONSUMER.LIST.{source.stream}")
    except SourceError as error:
        if stream["state"].get("consumer_count"):
            findings.skipped("stream", f"whether its other consumers leave subjects to this one: {error}")
        return
    for other in answer.get("consumers") or ():
        theirs, ours = filters_of(other["config"]) or (">",), source.filter_subjects or (">",)
        if any(overlaps(subject, filter_) for subject in theirs for filter_ in ours):
            findings.problem(
                "stream",
                f"it is a work queue, and consumer {other['name']} takes the same subjects; "
                "set source.filter_subjects to others",
            )


async def check_filters(session: ReadSession, config: Config, findings: Findings, stream: Mapping[str, Any]) -> None:
    """Check that every filter subject can match messages."""
    settings = stream["config"]
    fed_by_others = any(settings.get(name) for name in ("mirror", "sources", "subject_transform"))
    for pattern in config.source.filter_subjects:
        if not fed_by_others and not any(overlaps(pattern, subject) for subject in settings.get("subjects") or ()):
            subjects = ", ".join(settings.get("subjects") or ())
            text = f"{pattern} matches none of the stream's subjects ({subjects})"
            findings.problem("filter", f"{text}; correct source.filter_subjects")
            continue
        try:
            answer = await session.api.request(f"STREAM.INFO.{config.source.stream}", {"subjects_filter": pattern})
        except SourceError:
            continue
        if (
            stream["state"]["messages"]
            and not answer["state"].get("num_subjects")
            and not answer["state"].get("subjects")
        ):
            findings.warning("filter", f"{pattern} matches no message that the stream holds")


async def check_notifications(
    session: ReadSession, config: Config, others: Iterable[Config], findings: Findings
) -> None:
    """Check that notifications do not come back, at once or through `others`. Without permission, skip the check."""
    notifiers = []
    for capture in (config, *(other for other in others if other != config)) if config.stored_subject else ():
        source, subject = capture.source, capture.stored_subject
        if subject and capture.nats == config.nats:
            with contextlib.suppress(SourceError):
                stream = (await session.api.request(f"STREAM.INFO.{source.stream}"))["config"]
                taken, filters = stream.get("subjects") or (), source.filter_subjects
                notifiers.append(Notifier(stream=source.stream, subject=subject, taken=taken, filters=filters))
    notifier = next((one for one in notifiers if one.stream == config.source.stream), None)
    if notifier is not None and (problem := notification_loop(notifier, notifiers)):
        findings.problem("on_stored", problem)


async def check_permissions(session: ReadSession, config: Config, findings: Findings, *, new_consumer: bool) -> None:
    """Publish like a capture, without effect: a pull that the server rejects, and an ack of no message."""
    source, api = config.source, session.api
    name = f"{source.stream}.{source.consumer}"
    denied: list[Denial] = []
    listeners = session.connection.denial_listeners
    listeners.append(denied.append)
    asked, body = f"{api.prefix}.CONSUMER.CREATE.{name}", b'{"stream_name":"-"}'
    if not new_consumer:  # refused, because the heartbeat is too long
        asked = f"{api.prefix}.CONSUMER.MSG.NEXT.{name}"
        body = b'{"batch":1,"expires":1000000000,"idle_heartbeat":1000000000}'
    missing = [asked] if await _denied(session, asked, body) else []
    ack = f"$JS.ACK.{name}.1.0.0.0.0"
    with contextlib.suppress(nats.errors.Error, OSError, SourceError):
        await session.connection.publish(ack, b"+WPI")
        await api.request("INFO")  # the answer comes after a refusal; that of a PING may come before
    if any(denial.about(ack) for denial in denied):
        missing.append(f"$JS.ACK.{name}.>")
    listeners.pop()
    if api.imported and not new_consumer:
        try:
            await session.connection.ask(f"$JS.ACK.{name}.1.{_NO_MESSAGE}.0.0.0", b"+WPI", _ANSWER)
        except nats.errors.NoRespondersError:
            findings.problem("permission", f"nobody receives acknowledgements to $JS.ACK.{name}.>; import $JS.ACK.>")
        except (nats.errors.Error, TimeoutError, DeniedError):
            pass  # denied, for example
    for subject in missing:
        findings.problem("permission", f"{refusal(subject)}; allow it")
    if not missing:
        findings.ok("permission", "this user may pull and acknowledge")


async def _denied(session: ReadSession, subject: str, payload: bytes) -> bool:
    with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
        try:
            await session.connection.ask(subject, payload, _ANSWER)
        except DeniedError:
            return True
    return False


def check_size(findings: Findings, config: Config, account: Mapping[str, Any]) -> None:
    """Check that the account allows the configured size of the stream."""
    section, limits = config.stream, account.get("limits") or {}
    configured = section.max_bytes if section is not None else None
    limit = limits.get("max_storage", -1)
    if configured is not None and 0 < limit < configured:
        findings.problem(
            "account", f"stream.max_bytes is {format_size(configured)}, the account allows {format_size(limit)}"
        )
