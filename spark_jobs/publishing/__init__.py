"""Publish from Spark executors."""
