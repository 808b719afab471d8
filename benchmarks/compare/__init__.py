"""jetcapture beside others, on the same stored messages, doing the same work."""
