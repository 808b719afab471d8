"""The fast receive path under nats-py."""
