"""The Grafana dashboard of examples/monitoring, as `make docs` writes it: rows of panels, each with its queries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

OWN = 'namespace=~"$namespace",instance=~"$replica",capture=~"$capture"'
"""Labels of every metric of a capture. A process with one capture has no label `capture`, which matches "all"."""
MAINTAINED = 'namespace=~"$namespace",capture=~"$capture",stream=~"$stream"'
"""Labels of every metric of maintenance, which has processes of its own."""
INFO = 'jetcapture_info{namespace=~"$namespace",stream=~"$stream"}'
NAMED = f"* on (instance, capture) group_left (stream, consumer) {INFO}"
"""Gives a metric the names of its stream and consumer."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Query = tuple[str, str]
"""A query, and the legend of its series."""


def of(metric: str, labels: str = "") -> str:
    """Return the query of a capture's metric, for the chosen streams."""
    return f"jetcapture_{metric}{{{OWN}{labels}}} and on (instance, capture) {INFO}"


def rate(metric: str) -> str:
    """Return the rate of a capture's counter."""
    return f"rate(jetcapture_{metric}{{{OWN}}}[$__rate_interval]) and on (instance, capture) {INFO}"


def maintained(metric: str) -> str:
    """Return the query of a metric of maintenance."""
    return f"jetcapture_maintain_{metric}{{{MAINTAINED}}}"


class Board:
    """A dashboard to which rows and panels are added, from left to right."""

    def __init__(self) -> None:
        self.panels: list[dict[str, Any]] = []
        self._x = self._y = self._height = 0

    def row(self, title: str) -> None:
        """Begin a row."""
        self._next_line()
        place = {"x": 0, "y": self._y, "w": 24, "h": 1}
        self.panels.append({"id": self._id(), "type": "row", "title": title, "collapsed": False, "gridPos": place})
        self._y += 1

    def stat(self, title: str, query: str, unit: str, about: str, *, bad: float | None = None) -> None:
        """Add a figure, red from `bad` on."""
        steps: list[dict[str, Any]] = [{"color": "text", "value": None}]
        if bad is not None:
            steps = [{"color": "green", "value": None}, {"color": "red", "value": bad}]
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
        self._add("stat", title, about, defaults, [(query, "")], size=(4, 4), options=options)

    def graph(self, title: str, unit: str, about: str, *queries: Query, width: int = 8) -> None:
        """Add curves over time."""
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        defaults = {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8}}
        self._add("timeseries", title, about, defaults, queries, size=(width, 8), options=options)

    def table(self, title: str, about: str, columns: Sequence[tuple[str, str, str]]) -> None:
        """Add a table of captures: the name, unit and query of each column."""
        names = {f"Value #{chr(65 + index)}": name for index, (name, _, _) in enumerate(columns)}
        hidden = {"Time": True, "instance": True, "capture": False}
        overrides = [
            {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
            for name, unit, _ in columns
        ]
        self._add("table", title, about, {}, [(query, "") for _, _, query in columns], size=(24, 8))
        panel = self.panels[-1]
        panel["fieldConfig"]["overrides"] = overrides
        panel["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"renameByName": names, "excludeByName": hidden}},
        ]
        for target in panel["targets"]:
            target |= {"format": "table", "instant": True}

    def _add(
        self,
        kind: str,
        title: str,
        about: str,
        defaults: dict[str, Any],
        queries: Sequence[Query],
        *,
        size: tuple[int, int],
        options: dict[str, Any] | None = None,
    ) -> None:
        width, height = size
        if self._x + width > 24:
            self._next_line()
        targets = [
            {"refId": chr(65 + index), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for index, (query, legend) in enumerate(queries)
        ]
        self.panels.append(
            {
                "id": self._id(),
                "type": kind,
                "title": title,
                "description": about,
                "datasource": SOURCE,
                "gridPos": {"x": self._x, "y": self._y, "w": width, "h": height},
                "fieldConfig": {"defaults": defaults, "overrides": []},
                "options": options or {},
                "targets": targets,
            }
        )
        self._x += width
        self._height = max(self._height, height)

    def _next_line(self) -> None:
        self._y += self._height
        self._x = self._height = 0

    def _id(self) -> int:
        return len(self.panels) + 1


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable with the values of a label, of which several or all can be chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> str:
    """Return the dashboard as JSON."""
    board = Board()
    _state(board)
    _flow(board)
    _watermark(board)
    _quarantine(board)
    _objects(board)
    _process(board)
    _maintenance(board)
    chosen = 'namespace=~"$namespace"'
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        variable("namespace", "Namespace", "label_values(jetcapture_info, namespace)"),
        variable("stream", "Stream", f"label_values(jetcapture_info{{{chosen}}}, stream)"),
        variable("capture", "Capture", f'label_values(jetcapture_info{{{chosen},stream=~"$stream"}}, capture)'),
        variable("replica", "Replica", f'label_values(jetcapture_info{{{chosen},stream=~"$stream"}}, instance)'),
    ]
    found = {
        "title": "jetcapture",
        "uid": "jetcapture",
        "tags": ["nats", "jetcapture"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": board.panels,
    }
    return json.dumps(found, indent=1) + "\n"


def _state(board: Board) -> None:
    board.row("State")
    board.stat("Not ready", f"sum(1 - ({of('ready')}))", "short", "Captures whose /readyz is 503.", bad=1)
    board.stat(
        "Failed",
        'sum(jetcapture_captures_failed{namespace=~"$namespace",instance=~"$replica"}) or vector(0)',
        "short",
        "Captures that failed or could not start, of processes with several.",
        bad=1,
    )
    board.stat("Lag", f"max({of('lag_seconds')})", "s", "Age of the oldest message that is not stored.")
    board.stat("Received", f"sum({rate('messages_fetched_total')})", "cps", "Messages per second.")
    board.stat(
        "Pending",
        f"sum(max by (stream, consumer) (({of('consumer_pending_messages')}) {NAMED}))",
        "short",
        "Messages that no replica has received.",
    )
    board.stat(
        "Quarantined",
        f"sum(increase(jetcapture_messages_quarantined_total{{{OWN}}}[$__range]) and on (instance, capture) {INFO})",
        "short",
        "Messages of the chosen time that could not be decoded.",
        bad=1,
    )
    by = "by (stream, consumer, capture)"
    board.table(
        "Captures",
        "Each with its worst replica.",
        [
            ("ready", "bool_yes_no", f"min {by} (({of('ready')}) {NAMED})"),
            ("lag", "s", f"max {by} (({of('lag_seconds')}) {NAMED})"),
            ("behind the watermark", "s", f"time() - max {by} (({of('watermark_timestamp_seconds')}) {NAMED})"),
            ("messages/s", "cps", f"sum {by} (({rate('messages_fetched_total')}) {NAMED})"),
            ("pending", "short", f"max {by} (({of('consumer_pending_messages')}) {NAMED})"),
            ("quarantined", "short", f"sum {by} (({of('messages_quarantined_total')}) {NAMED})"),
        ],
    )
    board.graph(
        "Not ready, by check",
        "short",
        "Replicas that fail a check of /readyz, and standbys of source.mode ordered.",
        (f"sum(1 - ({of('connected')}))", "not connected"),
        (f"sum(1 - ({of('consuming')}))", "not consuming"),
        (f"sum(1 - ({of('storing')}))", "not storing"),
        (f"sum(1 - ({of('active')}))", "not active"),
        width=12,
    )
    board.graph(
        "Losses of the stream",
        "short",
        "Times that the server lost messages, or the stream was created again.",
        (f"sum by (kind) ({of('stream_losses_total')})", "{{kind}}"),
        width=12,
    )


def _flow(board: Board) -> None:
    board.row("Messages")
    board.graph(
        "Messages per second",
        "cps",
        "",
        (f"sum({rate('messages_fetched_total')})", "received"),
        (f"sum({rate('messages_acked_total')})", "stored and acknowledged"),
        (f"sum({rate('messages_redelivered_total')})", "redelivered"),
    )
    board.graph(
        "Received, by stream",
        "cps",
        "",
        (f"sum by (stream) (({rate('messages_fetched_total')}) {NAMED})", "{{stream}}"),
    )
    board.graph(
        "Consumer",
        "short",
        "At max_ack_pending, the server waits with further messages.",
        (f"max({of('consumer_pending_messages')})", "pending"),
        (f"max({of('consumer_unacked_messages')})", "unacknowledged"),
        (f"min({of('consumer_max_ack_pending')})", "max_ack_pending"),
    )


def _watermark(board: Board) -> None:
    board.row("Lag and watermark")
    board.graph(
        "Lag, by stream",
        "s",
        "Age of the oldest message that is not stored. Up to block.max_age is normal.",
        (f"max by (stream, consumer) (({of('lag_seconds')}) {NAMED})", "{{stream}}/{{consumer}}"),
        width=12,
    )
    board.graph(
        "Behind the watermark, by stream",
        "s",
        "Everything older than this is in the archive.",
        (
            f"time() - max by (stream, consumer) (({of('watermark_timestamp_seconds')}) {NAMED})",
            "{{stream}}/{{consumer}}",
        ),
        width=12,
    )


def _quarantine(board: Board) -> None:
    board.row("Quarantine")
    board.graph(
        "Quarantined, by reason",
        "cps",
        "By the stage that failed. The status page and `quarantine list` have the texts.",
        (f"sum by (stage) ({rate('messages_quarantined_by_stage_total')})", "{{stage}}"),
        width=12,
    )
    board.graph(
        "Quarantined, by stream",
        "cps",
        "",
        (f"sum by (stream) (({rate('messages_quarantined_total')}) {NAMED})", "{{stream}}"),
        width=12,
    )


def _objects(board: Board) -> None:
    board.row("Objects and store")
    stored = [rate(f"stored_{what}_total") for what in ("bytes", "objects", "rows")]
    board.graph(
        "Object size, mean",
        "bytes",
        "Of the objects that were stored, before compaction.",
        (f"sum by (stream) (({stored[0]}) {NAMED}) / sum by (stream) (({stored[1]}) {NAMED})", "{{stream}}"),
    )
    board.graph(
        "Rows per object, mean",
        "short",
        "",
        (f"sum by (stream) (({stored[2]}) {NAMED}) / sum by (stream) (({stored[1]}) {NAMED})", "{{stream}}"),
    )
    board.graph(
        "Blocks sealed per second, by reason",
        "cps",
        "pressure: a limit sealed them early, so objects are small.",
        (f"sum by (reason) ({rate('blocks_sealed_total')})", "{{reason}}"),
    )
    board.graph("Stored", "Bps", "Bytes per second.", (f"sum by (stream) (({stored[0]}) {NAMED})", "{{stream}}"))
    buckets = f"sum by (le) ({rate('store_seconds_bucket')})"
    board.graph(
        "Time to store an object",
        "s",
        "",
        (f"histogram_quantile(0.5, {buckets})", "median"),
        (f"histogram_quantile(0.99, {buckets})", "99th percentile"),
    )
    board.graph(
        "Failures of the store per second",
        "cps",
        "permanent: somebody must fix something.",
        (f"sum by (kind) ({rate('store_errors_total')})", "{{kind}}"),
        (f"sum({rate('store_retries_total')})", "retries"),
        (f"sum({rate('on_stored_failures_total')})", "not announced"),
    )


def _process(board: Board) -> None:
    board.row("Process")
    own = "{{instance}} {{capture}}"
    resident = 'process_resident_memory_bytes{namespace=~"$namespace",instance=~"$replica"}'
    cpu = 'rate(process_cpu_seconds_total{namespace=~"$namespace",instance=~"$replica"}[$__rate_interval])'
    board.graph(
        "Memory",
        "bytes",
        "Messages that are held, and what the process uses in all.",
        (of("buffered_bytes"), f"buffered, {own}"),
        (of("buffered_bytes_limit"), f"limits.memory, {own}"),
        (f"{resident} and on (instance) {INFO}", "resident, {{instance}}"),
    )
    board.graph(
        "Spool and flight",
        "bytes",
        "",
        (of("spool_bytes"), f"spool, {own}"),
        (of("in_flight_bytes"), f"in flight, {own}"),
    )
    board.graph("CPU", "percentunit", "Of one core.", (f"{cpu} and on (instance) {INFO}", "{{instance}}"))
    board.graph("Oldest open block", "s", "", (of("oldest_open_block_seconds"), own))
    board.graph("Open blocks", "short", "", (of("open_blocks"), own))
    board.graph("Age of the batch in the decoder", "s", "", (of("decoding_seconds"), own))


def _maintenance(board: Board) -> None:
    board.row("Maintenance")
    named = "{{stream}}"
    board.graph(
        "Last pass without a failure",
        "s",
        "How long ago it ended.",
        (f"time() - ({maintained('last_pass_timestamp_seconds')} > 0)", named),
    )
    board.graph(
        "Duration of a pass", "s", "", (maintained("pass_seconds"), named), (maintained("failing"), f"failing, {named}")
    )
    board.graph(
        "Backlog", "short", "Objects that the running pass has still to merge.", (maintained("backlog_objects"), named)
    )
    board.graph(
        "Objects",
        "short",
        "",
        (maintained("objects_before"), f"before, {named}"),
        (maintained("objects_after"), f"after, {named}"),
        (maintained("waiting_objects"), f"replaced and waiting, {named}"),
    )
    board.graph(
        "Object size after compaction, mean",
        "bytes",
        "",
        (f"{maintained('bytes_after')} / ({maintained('objects_after')} > 0)", named),
    )
    removed = ("removed_objects_total", "expired_objects_total")
    board.graph(
        "Objects removed per second",
        "cps",
        "Replaced by larger ones, or expired.",
        *(
            (
                f"rate(jetcapture_maintain_{name}{{{MAINTAINED}}}[$__rate_interval])",
                f"{name.partition('_')[0]}, {named}",
            )
            for name in removed
        ),
    )
    board.graph(
        "Iceberg table: complete time slices up to",
        "s",
        "How long ago.",
        (f"time() - ({maintained('table_complete_to_timestamp_seconds')} > 0)", named),
    )
    board.graph("Iceberg table: objects", "short", "", (maintained("table_files"), named))
    board.graph(
        "Iceberg table: waiting",
        "short",
        "Objects that it cannot have yet, and columns whose names say their type.",
        (maintained("table_waiting_objects"), named),
        (maintained("table_renamed_columns"), f"renamed columns, {named}"),
    )
