"""Conformance kits: pytest suites that an implementation of yours can subclass.

    from goldenkv.conform import StoreSuite

    class TestMine(StoreSuite):
        supports_restart = True

        def open_store(self, folder, clock, capacity):
            return MyStore(folder, clock=clock)

`StoreSuite` says what a store must do, a test for each property. See `Hooks` for what else it can be told;
Hypothesis takes its profile from yours.

Raises:
    MissingExtra: on import, if pytest or hypothesis is not installed.
"""

from ..errors import MissingExtra

try:
    import hypothesis  # noqa: F401
    import pytest
except ImportError:
    raise MissingExtra("test", "the conformance suite") from None

PARTS = ("objects", "directory", "lifetimes", "damages", "threads", "machine")
# Before they are imported: so that a failed assertion shows its values in your tests as in ours.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in PARTS))

from .hooks import Clock, Hooks  # noqa: E402
from .stores import StoreSuite  # noqa: E402

__all__ = ["Clock", "Hooks", "StoreSuite"]
