"""The matrix: one cell for each kind of stream, consumer or way to a server, in the order of docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.integration.matrix import scenes, sites
from tests.integration.matrix.scenes import SECOND, Change, Scene
from tests.integration.matrix.stage import COUNT, Selection, Stage, everything

HOUR = 3600 * SECOND


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A capture of one kind of stream or consumer; `name` is its row of the page.

    In order: a stream with the settings `stream` (None: `fill` creates it, or nobody), a consumer with the settings
    `consumer` (None: the capture makes its own), `fill`, and a capture with the settings `source` until it has caught
    up, or with `during` while it holds what it has received. The archive then has what the stream had and `selects`
    chooses, and `after` checks more. With `refused`, the capture ends with that line instead. `play` replaces all of
    this. Servers before `since` do not support it.
    """

    name: str
    stream: Mapping[str, Any] | None = field(default_factory=dict)
    consumer: Mapping[str, Any] | None = None
    fill: Scene = scenes.fill
    source: Mapping[str, Any] = field(default_factory=dict)
    during: Change | None = None
    selects: Selection = everything
    after: Scene | None = None
    refused: str = ""
    play: Scene | None = None
    since: tuple[int, int] = (2, 10)

    def result(self, version: tuple[int, int]) -> str:
        """What the page says for a server."""
        if version < self.since:
            return "no"
        return ("ends" if self.play else "refused") if self.refused else "yes"

    async def run(self, stage: Stage) -> None:
        """Run the cell, and check its result."""
        if self.play is not None:
            await self.play(stage)
            return
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


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells under a heading, and the servers that they run on."""

    title: str
    cells: tuple[Cell, ...]
    site: sites.Opener = sites.single


RETENTION = (
    Cell(name="Limits retention, file storage"),
    Cell(
        name="Memory storage, `no_ack`, `first_seq`, `deny_delete`, `deny_purge`",
        stream={"storage": "memory", "no_ack": True, "first_seq": 1_000_000, "deny_delete": True, "deny_purge": True},
        fill=scenes.fill_unconfirmed,
    ),
    Cell(
        name="Interest retention: acknowledged messages leave the stream",
        stream={"retention": "interest"},
        consumer={},
        after=scenes.is_empty,
    ),
    Cell(
        name="Work queue, shared with another consumer by `source.filter_subjects`: acknowledged messages leave it",
        stream={"retention": "workqueue"},
        fill=scenes.fill_shared,
        source={"filter_subjects": ["{p}.1", "{p}.3"]},
        selects=scenes.of_two_subjects,
        after=scenes.has_those_of_others,
    ),
    Cell(
        name="`max_msgs` and `max_msgs_per_subject`, the oldest are discarded; compression `s2`",
        stream={"max_msgs": 4, "max_msgs_per_subject": 1, "compression": "s2"},
    ),
    Cell(
        name="`discard: new`, also per subject",
        stream={"discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 2},
        fill=scenes.fill_past_the_limit,
    ),
    Cell(name="`persist_mode: async`", stream={"persist_mode": "async"}, since=(2, 12)),
    Cell(
        name="Duplicates that the server drops (`Nats-Msg-Id`), and rollups",
        stream={"allow_rollup_hdrs": True},
        fill=scenes.fill_with_duplicates_and_rollup,
    ),
)

COPIES = (
    Cell(
        name="Mirror from a sequence on, with subject transforms: sequences as in the origin",
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
        name="Sources with subject transforms, and the stream's own messages",
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
        name="Subject transform, and republish",
        stream={
            "subject_transform": {"src": "{p}.>", "dest": "changed.{p}.>"},
            "republish": {"src": ">", "dest": "again.>"},
        },
    ),
)

MESSAGES = (
    Cell(name="`max_age`: messages that expire while they are held are archived", during=scenes.expire_by_age),
    Cell(
        name="Message TTL: the messages, and the delete markers that replace them",
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
        name="Counters: increment and total of each message",
        stream={"allow_msg_counter": True},
        fill=scenes.fill_counters,
        since=(2, 12),
    ),
    Cell(name="Atomic batches", stream={"allow_atomic": True}, fill=scenes.fill_batch, since=(2, 12)),
    Cell(name="Fast batches", stream={"allow_batched": True}, fill=scenes.fill_fast_batch, since=(2, 14)),
    Cell(
        name="Scheduled messages that wait or fall due: the schedules, and what they publish",
        stream={"allow_msg_schedules": True, "allow_rollup_hdrs": True},
        fill=scenes.fill_nothing,
        during=scenes.fall_due,
        since=(2, 12),
    ),
    Cell(name="Stream of a key-value bucket, with deletes and purges", stream=None, fill=scenes.fill_key_value),
    Cell(name="Stream of an object store", stream=None, fill=scenes.fill_object_store),
)

MISSING = "stream {stream} does not exist; create it, or correct source.stream"
NO_CONSUMER = "consumer {consumer} does not exist on stream {stream}"
DELETED = "consumer {consumer} of stream {stream} no longer accepts pulls: 409 Consumer Deleted"
"""Unless no pull is open at that moment; then it is one of those above."""

CHANGES = (
    Cell(name="Limits, subjects, compression, transform, republish and retention edited", during=scenes.edit),
    Cell(
        name="Messages deleted, a subject or all purged: what was delivered is archived", during=scenes.remove_messages
    ),
    Cell(name="Sealed", during=scenes.seal),
    Cell(name="Mirror turned into an ordinary stream", play=scenes.play_promoted, since=(2, 12)),
    Cell(
        name="Stream deleted: what is held is stored, and the capture ends",
        play=scenes.play_ended("STREAM.DELETE.{stream}", DELETED, MISSING),
        refused=DELETED,
    ),
    Cell(
        name="Consumer deleted: what is held is stored, and the capture ends",
        play=scenes.play_ended("CONSUMER.DELETE.{stream}.{consumer}", DELETED, NO_CONSUMER),
        refused=DELETED,
    ),
    Cell(
        name="Restored from a backup with its consumer: the archive continues",
        play=scenes.play_restored(consumers=True),
    ),
    Cell(
        name="Restored from a backup without its consumer: captured again, read once",
        play=scenes.play_restored(consumers=False),
    ),
    Cell(
        name="Restored under another name: captured as a stream of its own",
        play=scenes.play_restored(consumers=False, stream="{s}-restored"),
        since=(2, 15),
    ),
)

CONSUMERS = (
    Cell(
        name="`backoff`, `max_ack_pending: unlimited`, `mem_storage`, `replay_policy: original`, `sample_freq`, "
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
        name="`max_waiting: 1`, `max_ack_pending: 3`, `max_batch`, `max_expires`, `max_bytes`",
        consumer={
            "max_waiting": 1,
            "max_ack_pending": 3,
            "max_batch": 2,
            "max_expires": 50_000_000,
            "max_bytes": 2_000,
        },
    ),
    Cell(
        name="`max_deliver`, `inactive_threshold`. `check` warns.",
        consumer={"max_deliver": 5, "inactive_threshold": HOUR},
        after=scenes.check_warns,
    ),
    Cell(
        name="`max_deliver` used up by another client: these messages are not delivered any more. "
        "`verify` lists them as holes, or says that it cannot know.",
        play=scenes.play_given_up,
    ),
    Cell(name="Ephemeral. The server deletes it soon after the capture has stopped.", consumer={"durable_name": ""}),
    Cell(
        name="`deliver_policy: last_per_subject`, likewise `last`",
        source={"deliver_policy": "last_per_subject"},
        selects=scenes.last_of_each_subject,
    ),
    Cell(
        name="`deliver_policy: new`",
        source={"deliver_policy": "new"},
        fill=scenes.fill_nothing,
        during=scenes.refill,
    ),
    Cell(
        name="`deliver_policy: by_start_sequence`, likewise `by_start_time`",
        source={"deliver_policy": "by_start_sequence", "start_sequence": 4},
        selects=scenes.from_the_fourth,
    ),
    Cell(
        name="Several filter subjects",
        source={"filter_subjects": ["{p}.1", "{p}.3"]},
        selects=scenes.of_two_subjects,
    ),
    Cell(
        name="Paused: the capture waits until it is resumed. `check` reports it.",
        play=scenes.play_paused,
        since=(2, 11),
    ),
    Cell(name="Reset under a capture: delivered again, read once", during=scenes.reset, since=(2, 14)),
)

REFUSED = (
    Cell(name="Stream that does not exist", stream=None, fill=scenes.fill_nothing, refused=MISSING),
    Cell(
        name="`consumer_limits.max_ack_pending` below `source.max_ack_pending`",
        stream={"consumer_limits": {"max_ack_pending": 100}},
        refused="NATS refused: consumer max ack pending exceeds system limit of 100",
    ),
    Cell(
        name="Work queue with another consumer of the same subjects",
        stream={"retention": "workqueue"},
        fill=scenes.add_other_consumer,
        refused="NATS refused: multiple non-filtered consumers not allowed on workqueue stream",
    ),
    Cell(
        name="Subjects that overlap `nats.inbox_prefix`, `$JS.ACK.>` or `$JS.API.>`, or a mirror of such a stream",
        stream={"subjects": ["{p}.>", "_INBOX.{p}.>"]},
        refused="stream {stream} takes _INBOX.{prefix}.>, which overlaps _INBOX.*.>, so it would store every "
        "delivery again, without end; give it other subjects",
    ),
    Cell(
        name="Sequence 2^62 - 1 reached, the last one that servers deliver",
        stream={"first_seq": (1 << 62) - COUNT},
        refused="stream {stream} ends at sequence 4611686018427387903, and servers deliver nothing from sequence "
        "4611686018427387904 on; create the stream again, with sequences from 1 on",
    ),
    Cell(
        name="`ack_policy: none`, likewise `all`",
        consumer={"ack_policy": "none"},
        refused="consumer {consumer} of stream {stream} has ack_policy none; explicit is required, "
        "or messages count as handled before they are stored",
    ),
    Cell(
        name="`headers_only`",
        consumer={"headers_only": True},
        refused="consumer {consumer} of stream {stream} has headers_only set; it must be off, "
        "or messages are delivered without their payload",
    ),
    Cell(
        name="Push consumer",
        consumer={"deliver_subject": "{p}-push"},
        refused="consumer {consumer} of stream {stream} is a push consumer; a pull consumer is required",
    ),
    Cell(
        name="Priority groups",
        consumer={"priority_policy": "pinned_client", "priority_groups": ["a"]},
        refused="consumer {consumer} of stream {stream} has priority groups (pinned_client); "
        "source.mode shared pulls without a group",
        since=(2, 11),
    ),
)

CONNECTIONS = (
    Cell(name="Websocket, `wss://`", play=scenes.play_secure_websocket),
    Cell(
        name="Domain of the hub, from a leaf node without JetStream (`nats.domain`)",
        fill=scenes.fill_and_use_domain,
    ),
    Cell(
        name="Leaf node without JetStream, `nats.domain` not set",
        fill=scenes.use_bare_leaf,
        refused="JetStream does not answer: it is not enabled, or has no leader",
    ),
    Cell(name="Domain of a leaf node, from the hub (`nats.domain`)", play=scenes.play_leaf_from_hub),
    Cell(
        name="Imported from another account (`nats.api_prefix`). "
        "Messages behind one without headers and payload may be delayed.",
        play=scenes.play_imported,
    ),
)

CLUSTERS = (
    Cell(
        name="R3, memory storage, consumer in memory on one server",
        stream={"num_replicas": 3, "storage": "memory"},
        consumer={"num_replicas": 1, "mem_storage": True},
    ),
    Cell(
        name="R3, file storage: leaders of stream and consumer change while it is captured",
        stream={"num_replicas": 3},
        during=scenes.change_leaders,
    ),
    Cell(name="R1 scaled to R3 and back while it is captured", during=scenes.scale),
)

GROUPS = (
    Group(title="Retention, limits and storage", cells=RETENTION),
    Group(title="Copies and transforms", cells=COPIES),
    Group(title="Messages", cells=MESSAGES),
    Group(title="Streams changed while they are captured", cells=CHANGES),
    Group(title="Consumers", cells=CONSUMERS),
    Group(title="Streams and consumers that are refused", cells=REFUSED),
    Group(title="Connections", cells=CONNECTIONS, site=sites.hub),
    Group(title="Clusters", cells=CLUSTERS, site=sites.cluster),
)


def cells_of(site: sites.Opener) -> list[Cell]:
    """The cells that run on a site."""
    return [cell for group in GROUPS if group.site is site for cell in group.cells]


def tables() -> str:
    """The tables of the page: results by server, and what a capture says where it refuses."""
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
