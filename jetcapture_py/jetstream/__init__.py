"""Talk to NATS JetStream: connect, pull, acknowledge, publish and inspect."""
