"""The command, which gives up a server that is not there after a second."""

from __future__ import annotations

from jetcapture_py.cli import main
from jetcapture_py.jetstream import link

if __name__ == "__main__":
    link.CONNECT_TIMEOUT_S = 1.0
    main()
