"""Recreate a stream from its archive."""
