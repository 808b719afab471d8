"""Metrics, probes and the status of a capture."""
