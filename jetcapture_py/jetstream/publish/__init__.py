"""Publish to JetStream in bulk, with every message accounted for."""
