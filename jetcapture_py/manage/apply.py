"""The `apply` command: create or update the stream and the consumer as configured.

Changes that may delete messages are only made if the user says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from jetcapture_py.config.model import Config
from jetcapture_py.errors import SourceError
from jetcapture_py.jetstream.connection import ApiError, UnavailableError
from jetcapture_py.jetstream.consumer import Difference, differences, differing
from jetcapture_py.jetstream.read_session import ReadSession
from jetcapture_py.manage.export import NEEDS, lines, shown
from jetcapture_py.manage.many import CommandResult
from jetcapture_py.manage.plan import Plan, plans
from jetcapture_py.text import plural

DONE, REFUSED, LEFT = 0, 1, 3
TIMEOUT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A plan and its result. `answer` is the server's configuration afterwards, None if nothing was requested.

    `ignored` are settings that the server did not adopt.
    """

    plan: Plan
    answer: dict[str, Any] | None = None
    ignored: Sequence[Difference] = ()

    @property
    def summary(self) -> str:
        """What is done or would be, in a few words."""
        plan = self.plan
        if not plan.possible:
            reasons = [plan.refusal, *(f"{change.name}: {change.refusal}" for change in plan.changes if change.refusal)]
            return f"{plan.kind} refused: {next(filter(None, reasons), '')}"
        if plan.action == "none":
            return f"{plan.kind} as configured"
        left = f"{plural(len(plan.left), 'setting')} left ({NEEDS})" if plan.left else ""
        if not plan.requests:
            return f"{plan.kind}: {left}"
        would = "" if self.answer is not None else "would be "
        parts = [plural(len(plan.changes) - len(plan.left), "setting")] if plan.action == "update" else []
        parts += [f"{len(self.ignored)} ignored"] if self.ignored else []
        about = f" ({', '.join(parts)})" if parts else ""
        return f"{plan.kind} {would}{plan.action}d{about}{', ' if left else ''}{left}"

    def lines(self) -> Iterator[Text]:
        """Yield the changes, and what the server ignored."""
        yield from lines(self.plan, done=self.answer is not None)
        for left in self.ignored:
            asked, has = shown(left.name, left.configured), shown(left.name, left.actual)
            yield Text(f"  {left.name}: the server ignored {asked} and has {has}", "yellow")

    def fields(self) -> dict[str, Any]:
        """Return JSON values; settings have the values of the JetStream API."""
        plan = self.plan
        return {
            "kind": plan.kind,
            "name": plan.name,
            "action": plan.action,
            "changes": [
                {
                    "setting": change.name,
                    "old": change.old,
                    "new": change.new,
                    "refusal": change.refusal,
                    "may_delete": change.may_delete,
                    "left": change.name in plan.left,
                }
                for change in plan.changes
            ],
            "refusal": plan.refusal,
            "request": plan.request,
            "answer": self.answer,
            "ignored": [{"setting": left.name, "asked": left.configured, "is": left.actual} for left in self.ignored],
        }


def run(config: Config, *, dry_run: bool, may_delete: bool = False) -> CommandResult:
    """Apply, and return what has changed. Raises SourceError."""
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
        if plan.action == "update" and any(change.name == "pause_until" for change in plan.changes):
            until = {"pause_until": plan.request["pause_until"]}  # for which an update is not enough
            await session.api.request(f"CONSUMER.PAUSE.{stream}.{plan.name}", until)
    except (ApiError, UnavailableError) as error:
        raise SourceError(f"{plan.kind} {plan.name} was not {plan.action}d: {error}") from error
    if plan.kind == "consumer":  # the answer to the first update after a restart of the server is the state before it
        answer = (await session.request(f"CONSUMER.INFO.{stream}.{plan.name}"))["config"]
    is_stream = plan.kind == "stream"
    left = differing(plan.configured, answer) if is_stream else differences(config.source, answer)
    return Applied(plan=plan, answer=answer, ignored=[found for found in left if found.name not in plan.left])
