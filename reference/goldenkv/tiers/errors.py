"""Every way in which a store can fail to give or to take an object. Who asked recomputes.

Each has a `reason`, one word or two for metrics and logs: no key, no token id and no path is in it.
"""

from __future__ import annotations

from typing import ClassVar


class StoreError(RuntimeError):
    """A store did not do what was asked. What it held before is as it was."""

    reason: ClassVar[str] = "store error"


class Missing(StoreError):
    """Nothing is there under this address: never put, deleted, evicted, or not put completely."""

    reason = "missing"


class Expired(Missing):
    """It was there, and its time is over."""

    reason = "expired"


class Corrupt(StoreError):
    """Bytes differ from their checksum, or do not make an object at all."""

    reason = "corrupt"


class Truncated(Corrupt):
    """It ends before its head says it does, or is empty."""

    reason = "truncated"


class Foreign(StoreError):
    """A whole object, but of another address, layout, component table, size or format version."""

    reason = "foreign"


class Unreadable(StoreError):
    """It is encrypted, and the key that it needs is destroyed, unknown or another."""

    reason = "unreadable"


class Unavailable(StoreError):
    """The store does not answer, or not in time, or refuses to talk to us."""

    reason = "unavailable"


class Full(StoreError):
    """No room. Nothing of the object was kept."""

    reason = "full"


class OverQuota(Full):
    """The owner has as much as it may have."""

    reason = "over quota"


class ReadOnly(StoreError):
    """The store cannot be written."""

    reason = "read only"


class Late(StoreError):
    """It had not come by its deadline. What still comes is thrown away."""

    reason = "late"
