"""Maintains archives in bounded memory, once or as a service: compaction, Iceberg tables and expiry."""
