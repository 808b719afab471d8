"""The matrix: every cell, in the order of the page."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.matrix import changes, consumers, places, sites, streams
from tests.integration.matrix.cell import Cell


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells under a heading, and the servers that they run on."""

    title: str
    cells: tuple[Cell, ...]
    site: sites.Opener = sites.single


GROUPS = (
    Group(title="Retention, limits and storage", cells=streams.RETENTION),
    Group(title="Copies and transforms", cells=streams.COPIES),
    Group(title="Messages", cells=streams.MESSAGES),
    Group(title="Streams changed while they are captured", cells=changes.CHANGES),
    Group(title="Consumers", cells=consumers.WORKING),
    Group(title="Streams and consumers that are refused", cells=(*streams.REFUSED, *consumers.REFUSED_CONSUMERS)),
    Group(title="Connections", cells=places.WAYS, site=sites.hub),
    Group(title="Clusters", cells=places.CLUSTERS, site=sites.cluster),
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
            rows.append(f"| {' | '.join([f'{cell.name}. {cell.note}' if cell.note else cell.name, *results])} |")
        parts.append(f"## {group.title}\n\n" + "\n".join(rows) + "\n")
    rows = ["| | the line that a capture ends with |", "|---|---|"]
    for cell in (cell for group in GROUPS for cell in group.cells if cell.refused):
        rows.append(f"| {cell.name} | `{cell.refused.format(stream='ORDERS', consumer='archive', prefix='orders')}` |")
    return "\n".join([*parts, "## Reasons", "", *rows, ""])
