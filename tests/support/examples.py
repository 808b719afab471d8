"""How many examples Hypothesis tries, by profile: `quick` in `make test`, `thorough` in `make test-exhaustive`.

The quick ones are the same in every run, as long as the same modules are loaded: Hypothesis takes constants from their
source. `pytest --hypothesis-profile=thorough` tries four times as many, and new ones each time.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    max_examples=40,
    derandomize=True,
    deadline=None,  # the machine may be busy with anything
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.register_profile(
    "thorough", settings.get_profile("quick"), max_examples=160, derandomize=False, print_blob=True
)
settings.load_profile("quick")


def examples(*, cost: int = 1, steps: int = 50) -> settings:
    """Settings for a test of which an example takes as long as `cost` ordinary ones, and has up to `steps` steps."""
    profile = settings()
    return settings(profile, max_examples=profile.max_examples // cost, stateful_step_count=steps)
