"""Prove that an archive is complete."""
