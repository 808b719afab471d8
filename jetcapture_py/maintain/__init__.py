"""Keeps archives in shape: passes of compaction, each part with bounded memory, once or as a service."""
