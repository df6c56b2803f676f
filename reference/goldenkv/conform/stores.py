"""The suite for stores: everything that `tiers.store.Store` promises, a test for each property."""

from __future__ import annotations

from .damages import Damages
from .directory import Directory
from .lifetimes import Lifetimes
from .machine import Machine
from .objects import Objects
from .threads import Threads


class StoreSuite(Objects, Directory, Lifetimes, Damages, Threads, Machine):
    """Subclass it under a name that starts with `Test`, say how a store is opened, and what it can.

    What every store must do has no flag. What a flag rules out is skipped, with the flag as the reason.
    The addresses that tests use are new in every run, and are deleted afterwards: a shared server will do.
    """
