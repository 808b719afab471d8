"""Change an archive's messages: decode its quarantine again, and erase messages for good."""
