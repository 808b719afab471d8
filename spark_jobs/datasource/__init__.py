"""The `nats` data source."""
