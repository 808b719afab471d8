"""Merge small and overlapping objects without Spark: plan, merge, check, and choose the objects to remove."""
