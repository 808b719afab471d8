"""Properties against references that are written from the documentation, and not from the code."""
