"""Decoders: payloads to columns, one file a format."""
