"""Commands around a capture: manage its stream and consumer, check a configuration, and try it on messages."""
