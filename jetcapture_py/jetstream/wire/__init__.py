"""The receive path under nats-py."""
