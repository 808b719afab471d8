"""The matrix: one cell for each kind of stream, consumer or way to a server, in the order of docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from tests.integration.matrix import scenes, sites
from tests.integration.matrix.scenes import SECOND, Change, Scene
from tests.integration.matrix.stage import COUNT, Selection, Site, Stage, connected, everything

HOUR = 3600 * SECOND


@dataclass(frozen=True)
class Cell:
    """A capture of one kind of stream or consumer; `name` is its row of the page.

    In order: a stream with the settings `stream` (None: `fill` creates it, or nobody), a consumer with the settings
    `consumer` (None: the capture makes its own), `fill`, and a capture with the settings `source` until it has caught
    up, or with `during` while it holds what it has received. The archive then has what the stream had and `selects`
    chooses, and `after` checks more. With `refused`, the capture ends with that line instead. `play` replaces all of
    this. Servers before `since` do not support it. `client` connects for the test's own requests, and `login` has
    further settings of the capture's section `nats`.
    """

    name: str
    _: KW_ONLY
    stream: Mapping[str, Any] | None = field(default_factory=dict)
    consumer: Mapping[str, Any] | None = None
    fill: Scene = Stage.fill
    source: Mapping[str, Any] = field(default_factory=dict)
    during: Change | None = None
    selects: Selection = everything
    after: Scene | None = None
    refused: str = ""
    play: Scene | None = None
    since: tuple[int, int] = (2, 10)
    client: Callable[[Site], AbstractAsyncContextManager[Client]] = lambda site: connected(site.url)
    login: Callable[[Site], Mapping[str, Any]] = lambda _: {}

    def result(self, version: tuple[int, int]) -> str:
        if version < self.since:
            return "no"
        return ("ends" if self.play else "refused") if self.refused else "yes"

    async def run(self, site: Site, number: int, directory: Path) -> None:
        async with self.client(site) as client:
            stage = Stage(client=client, site=site, number=number, directory=directory, login=self.login(site))
            await (self.play or self._run)(stage)

    async def _run(self, stage: Stage) -> None:
        stage.selects = self.selects
        if self.stream is not None:
            await stage.create(**self.stream)
        if self.consumer is not None:
            await stage.consumer(**self.consumer)
        await self.fill(stage)
        if self.refused:
            await stage.check_refused(self.refused, **self.source)
            return
        if self.during is None:
            await stage.capture(**self.source)
        else:
            async with stage.capturing(**self.source) as state:
                await self.during(stage, state)
        await stage.check_archive()
        if self.after is not None:
            await self.after(stage)


@dataclass(frozen=True)
class Group:
    """Cells under a heading, and the servers that they run on."""

    title: str
    cells: tuple[Cell, ...]
    site: sites.Opener = sites.single


RETENTION = (
    Cell("Limits retention, file storage"),
    Cell(
        "Memory storage, `no_ack`, `first_seq`, `deny_delete`, `deny_purge`",
        stream={"storage": "memory", "no_ack": True, "first_seq": 1_000_000, "deny_delete": True, "deny_purge": True},
        fill=scenes.fill_unconfirmed,
    ),
    Cell(
        "Interest retention: acknowledged messages leave the stream",
        stream={"retention": "interest"},
        consumer={},
        after=lambda stage: stage.holds(0),
    ),
    Cell(
        "Work queue, shared with another consumer by `source.filter_subjects`: acknowledged messages leave it",
        stream={"retention": "workqueue"},
        fill=scenes.fill_shared,
        source={"filter_subjects": ["{p}.1", "{p}.3"]},
        selects=scenes.of_two_subjects,
        after=lambda stage: stage.holds(COUNT - 4),  # those for the other consumer are left
    ),
    Cell(
        "`max_msgs` and `max_msgs_per_subject`, the oldest are discarded; compression `s2`",
        stream={"max_msgs": 4, "max_msgs_per_subject": 1, "compression": "s2"},
    ),
    Cell(
        "`discard: new`, also per subject",
        stream={"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 2},
        fill=scenes.fill_past_the_limit,
    ),
    Cell("`persist_mode: async`", stream={"persist_mode": "async"}, since=(2, 12)),
    Cell(
        "Duplicates that the server drops (`Nats-Msg-Id`), and rollups",
        stream={"allow_rollup_hdrs": True},
        fill=scenes.fill_with_duplicates_and_rollup,
    ),
)

COPIES = (
    Cell(
        "Mirror from a sequence on, with subject transforms: sequences as in the origin",
        play=scenes.play_copied(
            2,
            mirror={
                "name": "{s}-a",
                "opt_start_seq": 4,
                "subject_transforms": [{"src": "{p}-a.1", "dest": "{p}-copy.1"}],
            },
        ),
    ),
    Cell(
        "Sources with subject transforms, and the stream's own messages",
        play=scenes.play_copied(
            COUNT + 4 + COUNT,
            sources=[
                {"name": "{s}-a", "subject_transforms": [{"src": "{p}-a.0", "dest": "{p}-copy.0"}]},
                {"name": "{s}-b"},
            ],
            subjects=["{p}.>"],
        ),
    ),
    Cell(
        "Subject transform, and republish",
        stream={
            "subject_transform": {"src": "{p}.>", "dest": "changed.{p}.>"},
            "republish": {"src": ">", "dest": "again.>"},
        },
    ),
)

MESSAGES = (
    Cell("`max_age`: messages that expire while they are held are archived", during=scenes.expire_by_age),
    Cell(
        "Message TTL: the messages, and the delete markers that replace them",
        # with one message a subject, its TTL may be shorter than that of its delete marker
        stream={
            "allow_msg_ttl": True,
            "subject_delete_marker_ttl": HOUR,
            "allow_rollup_hdrs": True,
            "max_msgs_per_subject": 1,
        },
        fill=scenes.fill_nothing,
        during=scenes.expire_with_marker,
        since=(2, 11),
    ),
    Cell(
        "Counters: increment and total of each message",
        stream={"allow_msg_counter": True},
        fill=scenes.fill_counters,
        since=(2, 12),
    ),
    Cell("Atomic batches", stream={"allow_atomic": True}, fill=scenes.fill_batch, since=(2, 12)),
    Cell("Fast batches", stream={"allow_batched": True}, fill=scenes.fill_fast_batch, since=(2, 14)),
    Cell(
        "Scheduled messages that wait or fall due: the schedules, and what they publish",
        stream={"allow_msg_schedules": True, "allow_rollup_hdrs": True},
        fill=scenes.fill_nothing,
        during=scenes.fall_due,
        since=(2, 12),
    ),
    Cell("Stream of a key-value bucket, with deletes and purges", stream=None, fill=scenes.fill_key_value),
    Cell("Stream of an object store", stream=None, fill=scenes.fill_object_store),
)

MISSING = "stream {stream} does not exist; create it, or correct source.stream"
NO_CONSUMER = "consumer {consumer} does not exist on stream {stream}"
DELETED = "consumer {consumer} of stream {stream} no longer accepts pulls: 409 Consumer Deleted"
"""Unless no pull is open at that moment; then it is one of those above."""

CHANGES = (
    Cell("Limits, subjects, compression, transform, republish and retention edited", during=scenes.edit),
    Cell("Messages deleted, a subject or all purged: what was delivered is archived", during=scenes.remove_messages),
    Cell("Sealed", during=scenes.seal),
    Cell("Mirror turned into an ordinary stream", play=scenes.play_promoted, since=(2, 12)),
    Cell(
        "Stream deleted: what is held is stored, and the capture ends",
        play=scenes.play_ended("STREAM.DELETE.{stream}", DELETED, MISSING),
        refused=DELETED,
    ),
    Cell(
        "Consumer deleted: what is held is stored, and the capture ends",
        play=scenes.play_ended("CONSUMER.DELETE.{stream}.{consumer}", DELETED, NO_CONSUMER),
        refused=DELETED,
    ),
    Cell("Restored from a backup with its consumer: the archive continues", play=scenes.play_restored(consumers=True)),
    Cell(
        "Restored from a backup without its consumer: captured again, read once",
        play=scenes.play_restored(consumers=False),
    ),
    Cell(
        "Restored under another name: captured as a stream of its own",
        play=scenes.play_restored(consumers=False, stream="{s}-restored"),
        since=(2, 15),
    ),
)

CONSUMERS = (
    Cell(
        "`backoff`, `max_ack_pending: unlimited`, `mem_storage`, `replay_policy: original`, `sample_freq`, "
        "`description`, `metadata`",
        consumer={
            "max_deliver": 3,
            "backoff": [SECOND, 5 * SECOND, 30 * SECOND],
            "max_ack_pending": -1,
            "mem_storage": True,
            "replay_policy": "original",
            "sample_freq": "100",
            "description": "of others",
            "metadata": {"team": "b"},
        },
    ),
    Cell(
        "`max_waiting: 1`, `max_ack_pending: 3`, `max_batch`, `max_expires`, `max_bytes`",
        consumer={
            "max_waiting": 1,
            "max_ack_pending": 3,
            "max_batch": 2,
            "max_expires": 50_000_000,
            "max_bytes": 2_000,
        },
    ),
    Cell(
        "`max_deliver`, `inactive_threshold`. `check` warns.",
        consumer={"max_deliver": 5, "inactive_threshold": HOUR},
        after=scenes.check_warns,
    ),
    Cell(
        "`max_deliver` used up by another client: these messages are not delivered any more. "
        "`verify` lists them as holes, or says that it cannot know.",
        play=scenes.play_given_up,
    ),
    Cell("Ephemeral. The server deletes it soon after the capture has stopped.", consumer={"durable_name": ""}),
    Cell(
        "`deliver_policy: last_per_subject`, likewise `last`",
        source={"deliver_policy": "last_per_subject"},
        selects=scenes.last_of_each_subject,
    ),
    Cell(
        "`deliver_policy: new`",
        source={"deliver_policy": "new"},
        fill=scenes.fill_nothing,
        during=lambda stage, state: stage.refill(state),
    ),
    Cell(
        "`deliver_policy: by_start_sequence`, likewise `by_start_time`",
        source={"deliver_policy": "by_start_sequence", "start_sequence": 4},
        selects=lambda messages: messages[3:],
    ),
    Cell("Several filter subjects", source={"filter_subjects": ["{p}.1", "{p}.3"]}, selects=scenes.of_two_subjects),
    Cell("Paused: the capture waits until it is resumed. `check` reports it.", play=scenes.play_paused, since=(2, 11)),
    Cell("Reset under a capture: delivered again, read once", during=scenes.reset, since=(2, 14)),
)

REFUSED = (
    Cell("Stream that does not exist", stream=None, fill=scenes.fill_nothing, refused=MISSING),
    Cell(
        "`consumer_limits.max_ack_pending` below `source.max_ack_pending`",
        stream={"consumer_limits": {"max_ack_pending": 100}},
        refused="NATS refused: consumer max ack pending exceeds system limit of 100",
    ),
    Cell(
        "Work queue with another consumer of the same subjects",
        stream={"retention": "workqueue"},
        fill=lambda stage: stage.consumer("other"),
        refused="NATS refused: multiple non-filtered consumers not allowed on workqueue stream",
    ),
    Cell(
        "Subjects that overlap `nats.inbox_prefix`, `$JS.ACK.>` or `$JS.API.>`, or a mirror of such a stream",
        stream={"subjects": ["{p}.>", "_INBOX.{p}.>"]},
        refused="stream {stream} takes _INBOX.{prefix}.>, which overlaps _INBOX.*.>, so it would store every "
        "delivery again, without end; give it other subjects",
    ),
    Cell(
        "Sequence 2^62 - 1 reached, the last one that servers deliver",
        stream={"first_seq": (1 << 62) - COUNT},
        refused="stream {stream} ends at sequence 4611686018427387903, and servers deliver nothing from sequence "
        "4611686018427387904 on; create the stream again, with sequences from 1 on",
    ),
    Cell(
        "`ack_policy: none`, likewise `all`",
        consumer={"ack_policy": "none"},
        refused="consumer {consumer} of stream {stream} has ack_policy none; explicit is required, "
        "or messages count as handled before they are stored",
    ),
    Cell(
        "`headers_only`",
        consumer={"headers_only": True},
        refused="consumer {consumer} of stream {stream} has headers_only set; it must be off, "
        "or messages are delivered without their payload",
    ),
    Cell(
        "Push consumer",
        consumer={"deliver_subject": "{p}-push"},
        refused="consumer {consumer} of stream {stream} is a push consumer; a pull consumer is required",
    ),
    Cell(
        "Priority groups",
        consumer={"priority_policy": "pinned_client", "priority_groups": ["a"]},
        refused="consumer {consumer} of stream {stream} has priority groups (pinned_client); "
        "source.mode shared pulls without a group",
        since=(2, 11),
    ),
)

CONNECTIONS = (
    Cell(
        "Websocket, `wss://`",
        client=lambda site: connected(site.leaf),
        login=lambda site: {"servers": [site.secure_websocket], "tls": {"ca": site.authority}},
    ),
    Cell(
        "Domain of the hub, from a leaf node without JetStream (`nats.domain`)",
        login=lambda site: {"servers": [site.bare_leaf], "domain": "hub"},
    ),
    Cell(
        "Leaf node without JetStream, `nats.domain` not set",
        login=lambda site: {"servers": [site.bare_leaf]},
        refused="JetStream does not answer: it is not enabled, or has no leader",
    ),
    Cell(
        "Domain of a leaf node, from the hub (`nats.domain`)",
        client=lambda site: connected(site.leaf),
        login=lambda _: {"domain": "leaf"},
    ),
    Cell(
        "Imported from another account (`nats.api_prefix`). "
        "Messages behind one without headers and payload may be delayed.",
        client=lambda site: connected(site.url, user="owner", password="o"),
        login=lambda _: {"user": "reader", "password": "r", "api_prefix": "JS.owner.API"},
        consumer={"ack_wait": SECOND},
        fill=lambda stage: stage.fill(4 * COUNT),
    ),
)

CLUSTERS = (
    Cell(
        "R3, memory storage, consumer in memory on one server",
        stream={"num_replicas": 3, "storage": "memory"},
        consumer={"num_replicas": 1, "mem_storage": True},
    ),
    Cell(
        "R3, file storage: leaders of stream and consumer change while it is captured",
        stream={"num_replicas": 3},
        during=scenes.change_leaders,
    ),
    Cell("R1 scaled to R3 and back while it is captured", during=scenes.scale),
)

GROUPS = (
    Group("Retention, limits and storage", RETENTION),
    Group("Copies and transforms", COPIES),
    Group("Messages", MESSAGES),
    Group("Streams changed while they are captured", CHANGES),
    Group("Consumers", CONSUMERS),
    Group("Streams and consumers that are refused", REFUSED),
    Group("Connections", CONNECTIONS, site=sites.hub),
    Group("Clusters", CLUSTERS, site=sites.cluster),
)


def tables() -> str:
    versions = [".".join(map(str, version)) for version in sites.VERSIONS]
    parts = []
    for group in GROUPS:
        rows = [f"| {' | '.join(['', *versions]).strip()} |", f"|{'---|' * (len(versions) + 1)}"]
        for cell in group.cells:
            results = [cell.result(version) for version in sites.VERSIONS]
            rows.append(f"| {' | '.join([cell.name, *results])} |")
        parts.append(f"### {group.title}\n\n" + "\n".join(rows) + "\n")
    rows = ["| | the line that a capture ends with |", "|---|---|"]
    for cell in (cell for group in GROUPS for cell in group.cells if cell.refused):
        rows.append(f"| {cell.name} | `{cell.refused.format(stream='ORDERS', consumer='archive', prefix='orders')}` |")
    return "\n".join([*parts, "## Reasons", "", *rows, ""])
