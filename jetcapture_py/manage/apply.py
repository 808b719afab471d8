"""The `apply` command: create or update the stream and the consumer as configured.

Changes that may delete messages are only made if the user says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from jetcapture_py.config.model import Config
from jetcapture_py.config.stream import api_values
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.consumer import Difference, differences, differing
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage.export import LIMITS, SIZES, shown
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.manage.plan import Plan, SettingChange, plans
from jetcapture_py.text import escaped, plural

DONE, REFUSED, LEFT = 0, 1, 3
TIMEOUT = 10.0
NEEDS = "needs --may-delete"
_NOTHING: tuple[Any, ...] = (None, "", (), [], {}, False)
_DONE = {"create": "created", "update": "changed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A plan and its result. `answer` is the server's configuration afterwards; None if nothing was requested.

    `ignored` are settings that the server did not adopt.
    """

    plan: Plan
    answer: dict[str, Any] | None = None
    ignored: Sequence[Difference] = ()

    @property
    def summary(self) -> str:
        """The action in a few words."""
        plan = self.plan
        if not plan.possible:
            reasons = [
                plan.refusal,
                *(f"{change.setting}: {change.refusal}" for change in plan.changes if change.refusal),
            ]
            return f"{plan.kind} refused: {next(filter(None, reasons), '')}"
        if plan.action == "none":
            return f"{plan.kind} as configured"
        left = f"{plural(plan.left, 'setting')} left ({NEEDS})" if plan.left else ""
        if not plan.requests:
            return f"{plan.kind}: {left}"
        would = "" if self.answer is not None else "would be "
        parts = [plural(len(plan.changes) - plan.left, "setting")] if plan.action == "update" else []
        parts += [f"{len(self.ignored)} ignored"] if self.ignored else []
        about = f" ({', '.join(parts)})" if parts else ""
        return f"{plan.kind} {would}{plan.action}d{about}{', ' if left else ''}{left}"

    def lines(self) -> Iterator[Text]:
        """Yield a line for the stream or consumer, one per change, and one per ignored setting."""
        plan = self.plan
        if not plan.possible:
            words = "cannot be configured like this"
        elif plan.action == "none":
            words = "is as configured"
        elif not plan.requests:
            words = "left as it is"
        else:
            words = f"{'will be ' if self.answer is None else ''}{_DONE[plan.action]}"
        yield Text(f"{plan.kind} {plan.name}: {words}")
        if plan.refusal:
            yield Text(f"  {plan.refusal}", "yellow")
        width = max((len(change.setting) for change in plan.changes), default=0)
        for change in plan.changes:
            yield _line(plan, change, width)
        for ignored in self.ignored:
            asked, has = shown(ignored.name, ignored.configured), shown(ignored.name, ignored.actual)
            yield Text(f"  {ignored.name}: the server ignored {asked} and has {has}", "yellow")

    def fields(self) -> dict[str, Any]:
        """Return JSON values; settings have the values of the JetStream API."""
        ignored = [{"setting": change.name, "asked": change.configured, "is": change.actual} for change in self.ignored]
        return {**asdict(self.plan), "answer": self.answer, "ignored": ignored}


def _line(plan: Plan, change: SettingChange, width: int) -> Text:
    line = Text(f"  {escaped(change.setting).ljust(width)} ")
    before = () if plan.action == "create" else (("-", change.old, "red"),)
    for sign, value, style in (*before, ("+", change.new, "green")):
        if value not in _NOTHING or change.setting in LIMITS | SIZES | {"max_age"}:
            line.append(f" {sign}{shown(change.setting, value)}", style)
    if change.refusal:
        line.append(f"  cannot be changed: {change.refusal}", "yellow")
    elif change.may_delete is not None:
        line.append(f"  {f'{NEEDS}: ' if change.left else ''}{change.may_delete}", "yellow")
    return line


def run(config: Config, *, dry_run: bool, may_delete: bool = False) -> CommandResult:
    """Apply, and return the changes. Raises SourceError."""
    applied = asyncio.run(apply(config, dry_run=dry_run, may_delete=may_delete))
    code = DONE
    if any(result.plan.left or (dry_run and result.plan.action != "none") for result in applied):
        code = LEFT
    if any(not result.plan.possible or result.ignored for result in applied):
        code = REFUSED
    return CommandResult(
        summary="; ".join(result.summary for result in applied),
        lines=[line for result in applied for line in result.lines()],
        records=[result.fields() for result in applied],
        as_list=True,
        code=code,
    )


async def apply(config: Config, *, dry_run: bool, may_delete: bool = False) -> list[Applied]:
    """Create or update the stream and the consumer; change nothing if anything is refused. Raises SourceError."""
    async with ReadSession(config.nats, f"jetcapture apply {config.source.stream}", timeout=TIMEOUT) as session:
        planned = await plans(session, config, may_delete=may_delete)
        if dry_run or not all(plan.possible for plan in planned):
            return [Applied(plan=plan) for plan in planned]
        return [await _made(session, config, plan) if plan.requests else Applied(plan=plan) for plan in planned]


async def _made(session: ReadSession, config: Config, plan: Plan) -> Applied:
    stream = config.source.stream
    if plan.kind == "stream":
        subject, body = f"STREAM.{plan.action.upper()}.{stream}", plan.request
    else:
        body = {"stream_name": stream, "config": plan.request, "action": plan.action}
        subject = f"CONSUMER.CREATE.{stream}.{plan.name}"
    try:
        answer = (await session.api.request(subject, body))["config"]  # once: a refusal is an answer
        if plan.action == "update" and any(change.setting == "pause_until" for change in plan.changes):
            until = {"pause_until": plan.request["pause_until"]}  # these need more than an update
            await session.api.request(f"CONSUMER.PAUSE.{stream}.{plan.name}", until)
    except SourceError as error:
        raise SourceError(f"{plan.kind} {plan.name} was not {plan.action}d: {error}") from error
    if plan.kind == "consumer":  # the answer to the first update after a restart of the server is the state before it
        answer = (await session.request(f"CONSUMER.INFO.{stream}.{plan.name}"))["config"]
    section = config.stream if plan.kind == "stream" else None
    ignored = differences(config.source, answer) if section is None else differing(api_values(section), answer)
    left = {change.setting for change in plan.changes if change.left}
    return Applied(
        plan=plan, answer=answer, ignored=[difference for difference in ignored if difference.name not in left]
    )
