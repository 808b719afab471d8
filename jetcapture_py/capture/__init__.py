"""Capture a stream: pull, decode, route, block, store, acknowledge."""
