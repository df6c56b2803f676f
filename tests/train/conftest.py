"""Training steps are compiled anew: to read one from the cache of compiled programs has crashed a worker."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="package")
def without_the_cache_of_programs() -> Iterator[None]:
    """Whether there is a cache is asked once, hence the resets."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
