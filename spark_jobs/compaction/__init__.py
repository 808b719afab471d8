"""Merge small and overlapping objects."""
