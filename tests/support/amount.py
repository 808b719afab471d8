"""How much is tested: proofs of many rounds, messages or combinations are short unless they are asked for in full."""

from __future__ import annotations

import os

ALL = os.environ.get("JETCAPTURE_TEST_SETTINGS") == "all"
"""Whether everything is asked for."""
