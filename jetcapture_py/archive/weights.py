"""Split sequence ranges into parts of equal weight; each range's weight is spread evenly over it.

Ranges may overlap; their first and last sequences (inclusive) and their weights are arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jetcapture_py.archive.arrays import Int64s, Seqs

Weights = npt.NDArray[np.float64] | Int64s


def cut(firsts: Seqs, lasts: Seqs, weights: Weights, target: float) -> Seqs:
    """Return the first sequences of parts of about the weight `target`, in order."""
    edges, totals = _cumulated(firsts, lasts, weights)
    count = max(1, round(totals[-1] / target))
    borders = np.interp(totals[-1] * np.arange(1, count) / count, totals, edges)
    return np.unique(np.concatenate([edges[:1], borders.astype(np.int64)]))


def reached(firsts: Seqs, lasts: Seqs, weights: Weights, limit: float) -> int:
    """Return the sequence at which the ranges' cumulative weight reaches `limit`; if none does, the one after all."""
    edges, totals = _cumulated(firsts, lasts, weights)
    return int(edges[-1]) if totals[-1] <= limit else int(np.interp(limit, totals, edges))


def _cumulated(firsts: Seqs, lasts: Seqs, weights: Weights) -> tuple[Seqs, npt.NDArray[np.float64]]:
    """Return the boundaries of the ranges, and the cumulative weight before each."""
    edges = np.unique(np.concatenate([firsts, lasts + 1]))
    slopes = np.zeros(len(edges))
    rates = weights / (lasts + 1 - firsts)
    np.add.at(slopes, np.searchsorted(edges, firsts), rates)
    np.add.at(slopes, np.searchsorted(edges, lasts + 1), -rates)
    return edges, np.concatenate([[0.0], np.cumsum(np.cumsum(slopes)[:-1] * np.diff(edges))])
