"""How much is tested: proofs of many rounds, messages or combinations are short unless they are asked for in full.

JETCAPTURE_TEST_SETTINGS=all asks for everything.
"""

from __future__ import annotations

import os

ALL = os.environ.get("JETCAPTURE_TEST_SETTINGS") == "all"
"""Whether everything is asked for."""


def sample_of(count: int) -> int:
    """Return a quarter of `count`, or all where everything is asked for."""
    return count if ALL else -(-count // 4)
