"""Turn received messages into routed rows."""
