"""Republish archived messages."""
