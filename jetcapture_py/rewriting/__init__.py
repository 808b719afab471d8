"""Changes what an archive holds: messages of its quarantine are decoded again, and messages are erased for good."""
