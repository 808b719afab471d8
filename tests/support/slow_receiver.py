"""The real command, receiving as with a nats-py that the frame parser does not know."""

from __future__ import annotations

from jetcapture_py.cli import main
from jetcapture_py.jetstream.wire import client

client.supported = lambda: False

if __name__ == "__main__":
    main()
