"""Read an archive as one table, each message once: what to read, as which types, and with which engine."""
