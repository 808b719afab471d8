"""Properties against references that are written from the documentation, and not from the code.

`make test` uses a fixed seed, but its examples still depend on which modules are loaded: Hypothesis takes constants
from their source. JETCAPTURE_HYPOTHESIS=long tries new examples, hundreds of times as many.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.support.amount import sample_of

LONG = os.environ.get("JETCAPTURE_HYPOTHESIS") == "long"


def examples(count: int, steps: int = 50) -> settings:
    """Settings for a test that tries so many examples, of `steps` steps; a profile would be every other test's, too."""
    return settings(
        max_examples=count * 100 if LONG else sample_of(count),
        derandomize=not LONG,
        deadline=None,
        print_blob=LONG,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        stateful_step_count=steps,
    )
