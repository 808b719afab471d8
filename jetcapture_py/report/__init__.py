"""The HTML report about an archive."""
