"""Keeps NATS JetStream streams as Parquet, and acknowledges only what is stored."""
