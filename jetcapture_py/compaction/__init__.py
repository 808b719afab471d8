"""Merges small and overlapping objects without Spark: what to merge, the merge, its check, and what may be removed."""
