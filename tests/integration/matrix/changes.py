"""Cells: streams that are changed while they are captured."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jetcapture_py.capture.pipeline import Capture
from jetcapture_py.errors import JetcaptureError
from tests.integration.matrix.cell import Cell, Change
from tests.integration.matrix.stage import COUNT, ServerRefusedError, Stage
from tests.integration.matrix.streams import MISSING, origin
from tests.integration.security import leaves
from tests.support.running import CONSUMER, until


def edited(**changes: Any) -> Change:
    """The stream's settings change; messages follow."""

    async def during(stage: Stage, state: Capture) -> None:
        await stage.update(**changes)
        await stage.refill(state)

    return during


async def purged(stage: Stage, state: Capture) -> None:
    await stage.ask(f"STREAM.PURGE.{stage.stream}")
    await stage.holds(0)
    await stage.refill(state)


async def one_subject_purged(stage: Stage, state: Capture) -> None:
    await stage.ask(f"STREAM.PURGE.{stage.stream}", {"filter": stage.own("{p}.1")})
    await stage.refill(state)


async def deleted(stage: Stage, state: Capture) -> None:
    for seq in (1, 4, COUNT):
        await stage.ask(f"STREAM.MSG.DELETE.{stage.stream}", {"seq": seq})
    await stage.refill(state)


async def sealed(stage: Stage, state: Capture) -> None:
    await stage.update(sealed=True)
    with pytest.raises(ServerRefusedError, match="sealed"):
        await stage.send("{p}.a", b"no more")


async def limited(stage: Stage, state: Capture) -> None:
    await stage.update(max_msgs_per_subject=1)
    await stage.fill(5)
    await stage.look()
    await stage.received(state)


# ------------------------------------------------------------------ a mirror becomes an ordinary stream


async def mirror_of_ten(stage: Stage) -> None:
    await origin(stage, stage.own("{s}-A"), stage.own("{p}-a"))
    await stage.create(mirror={"name": "{s}-A"})
    await stage.holds(COUNT)


async def play_promoted(stage: Stage) -> None:
    await mirror_of_ten(stage)
    async with stage.capturing() as state:
        await stage.update(mirror=None, subjects=["{p}.>"])
        await stage.refill(state)
    await stage.check_archive()


async def cannot_be_promoted(stage: Stage) -> None:
    await mirror_of_ten(stage)
    with pytest.raises(ServerRefusedError):
        await stage.update(mirror=None, subjects=["{p}.>"])


# ------------------------------------------------------------------ deleted and restored


async def backup(stage: Stage, *, consumers: bool) -> tuple[dict[str, Any], list[bytes]]:
    """A backup, as the server sends it."""
    inbox = stage.client.new_inbox()
    chunks = await stage.client.subscribe(inbox)
    request = {"deliver_subject": inbox, "no_consumers": not consumers}
    described = await stage.ask(f"STREAM.SNAPSHOT.{stage.stream}", request)
    found = []
    while (chunk := await chunks.next_msg(30)).data:
        found.append(chunk.data)
        if chunk.reply:
            await stage.client.publish(chunk.reply)
    await chunks.unsubscribe()
    return described, found


async def restore(stage: Stage, stream: str, described: dict[str, Any], chunks: list[bytes]) -> None:
    """Restore a backup. Raises ServerRefusedError."""
    request = {"config": {**described["config"], "name": stream}, "state": described["state"]}
    subject = (await stage.ask(f"STREAM.RESTORE.{stream}", request))["deliver_subject"]
    for chunk in [*chunks, b""]:
        answer = await stage.client.request(subject, chunk, 30)
        if answer.data and "error" in (found := json.loads(answer.data)):
            raise ServerRefusedError(found["error"]["description"])


async def delete_and_wait(stage: Stage, subject: str) -> None:
    """Delete something under a capture, and wait until it has noticed."""
    async with stage.capturing() as state:
        await stage.ask(subject)
        await until(lambda: state.source.failure is not None, "the capture has noticed")


def play_ended(subject: str, *messages: str) -> Any:
    """Something that the capture needs is deleted; it stores what it holds, and ends."""

    async def play(stage: Stage) -> None:
        await stage.create()
        await stage.fill()
        with pytest.raises(JetcaptureError) as caught, leaves():
            await asyncio.wait_for(delete_and_wait(stage, subject.format(stage.stream, CONSUMER)), 120)
        assert str(caught.value) in [each.format(stream=stage.stream, consumer=CONSUMER) for each in messages]
        await stage.check_archive(proven=False)

    return play


async def play_restored(stage: Stage, *, consumers: bool = True) -> None:
    """Captured in part, deleted, restored with its consumer, and captured again."""
    await stage.create()
    await stage.fill()
    await stage.look()
    await stage.capture()
    described, chunks = await backup(stage, consumers=consumers)
    await stage.ask(f"STREAM.DELETE.{stage.stream}")
    await restore(stage, stage.stream, described, chunks)
    await stage.fill()
    await stage.look()
    await stage.capture()
    await stage.check_archive()
    await stage.check_consumer()


async def play_restored_without_consumers(stage: Stage) -> None:
    """The same without the consumer: everything is captured a second time, and read once."""
    await play_restored(stage, consumers=False)


async def play_renamed(stage: Stage) -> None:
    """Restored under another name, which is then captured as a stream of its own."""
    await stage.create()
    await stage.fill()
    described, chunks = await backup(stage, consumers=False)
    await stage.ask(f"STREAM.DELETE.{stage.stream}")
    stage.stream = stage.own("{s}-restored")
    await restore(stage, stage.stream, described, chunks)
    await stage.fill()
    await stage.look()
    await stage.capture()
    await stage.check_archive()
    await stage.check_consumer()


async def cannot_be_renamed(stage: Stage) -> None:
    await stage.create()
    await stage.fill()
    described, chunks = await backup(stage, consumers=False)
    with pytest.raises(ServerRefusedError, match="names do not match"):
        await restore(stage, stage.own("{s}-restored"), described, chunks)


GONE = "consumer {consumer} of stream {stream} no longer accepts pulls: 409 Consumer Deleted"
STREAM_GONE = MISSING
"""Instead, where no pull was open at that moment."""
CONSUMER_GONE = "consumer {consumer} does not exist on stream {stream}"
"""Instead, where no pull was open at that moment."""

CHANGES = (
    Cell(name="Limits and subjects edited", during=edited(max_msgs=1000, subjects=["{p}.>", "{p}-more.>"])),
    Cell(name="Compression switched on", during=edited(compression="s2")),
    Cell(name="Subject transform added", during=edited(subject_transform={"src": "{p}.>", "dest": "changed.{p}.>"})),
    Cell(name="Republish added", during=edited(republish={"src": ">", "dest": "again.{p}.>"})),
    Cell(name="Retention changed from limits to interest", during=edited(retention="interest")),
    Cell(name="Purged: what was delivered is archived", during=purged),
    Cell(name="One subject purged", during=one_subject_purged),
    Cell(name="Messages deleted", during=deleted),
    Cell(name="`max_msgs_per_subject` lowered to 1", during=limited),
    Cell(name="Sealed", during=sealed),
    Cell(
        name="Mirror turned into an ordinary stream",
        play=play_promoted,
        since=(2, 12),
        lacking=cannot_be_promoted,
    ),
    Cell(
        name="Stream deleted: what is held is stored, and the capture ends",
        play=play_ended("STREAM.DELETE.{0}", GONE, STREAM_GONE),
        refused=GONE,
        verdict="ends",
    ),
    Cell(
        name="Consumer deleted: what is held is stored, and the capture ends",
        play=play_ended("CONSUMER.DELETE.{0}.{1}", GONE, CONSUMER_GONE),
        refused=GONE,
        verdict="ends",
    ),
    Cell(name="Restored from a backup with its consumer: the archive continues", play=play_restored),
    Cell(
        name="Restored from a backup without its consumer: captured again, read once",
        play=play_restored_without_consumers,
    ),
    Cell(
        name="Restored under another name: captured as a stream of its own",
        play=play_renamed,
        since=(2, 15),
        lacking=cannot_be_renamed,
    ),
)
