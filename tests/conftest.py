"""What all tests share: Hypothesis profiles, a cache of compiled programs, the golden files."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("default", derandomize=True, deadline=None, max_examples=200)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.register_profile("long", settings.get_profile("default"), max_examples=3000)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs, unless the caller has already named a folder for them."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = str(config.cache.mkdir("jax"))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        # The processes that tests start share it.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of a tiny checkpoint and what the official implementation computes from it."""
    folder = ROOT.parent / "shared" / "golden" / "official_tiny"
    if not folder.is_dir():
        pytest.skip("no ../shared/golden/official_tiny beside the checkout")
    return folder
