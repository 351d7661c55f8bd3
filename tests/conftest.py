"""What every test shares. Toy models and scripted drafters are in `cascade.testing`, for plugin authors too."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# torch reads this when it is first imported, so the tests that need no torch pay nothing. One thread
# each: workers of pytest-xdist would fight over the cores, and toy models are slower with more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# "ci" gives the same examples in every run: a red test is about the change, never about luck. Look for
# new examples with HYPOTHESIS_PROFILE=long.
_SLOW_MACHINE = [HealthCheck.too_slow]
settings.register_profile("ci", derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _one_thread():
    """Also where something imported torch before this file could speak, or a test changed it."""
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_blocked_plugins(monkeypatch):
    """What a developer blocks in their shell is not part of the tests."""
    monkeypatch.delenv("CASCADE_BLOCK_PLUGINS", raising=False)
