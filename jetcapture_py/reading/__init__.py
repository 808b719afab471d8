"""Read an archive as one table, each message once: selection, types, and engines."""
