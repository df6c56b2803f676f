"""How much an owner may store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import OverQuota
from .objects import Item
from .store import Store, Wrapper


@dataclass(slots=True)
class _Account:
    """An owner's bytes: what is known to be there at most, and the payloads that are being put."""

    used: int | None = None
    putting: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class Quota(Wrapper):
    """Lets an owner have no more than so many bytes of `inner`, heads included.

    It counts what goes through it, and looks into `inner` again whenever that count would refuse: a refusal
    rests on what is really there. What others put into the same store meanwhile it does not see before that.
    So n processes, each with a quota of its own, let an owner have n times the limit at worst.

    Args:
        inner: what is limited.
        limit: bytes, for all owners alike, or by owner.
    """

    def __init__(self, inner: Store, limit: int | Callable[[bytes], int]) -> None:
        super().__init__(inner)
        if not callable(limit) and limit < 0:
            raise ValueError(f"{limit=} must be bytes, 0 or more")
        self._limit = limit
        self._lock = threading.Lock()
        self._accounts: dict[bytes, _Account] = {}

    def limit(self, owner: bytes) -> int:
        """Bytes that an owner may have."""
        return self._limit(owner) if callable(self._limit) else self._limit

    def put(self, item: Item, ttl: float | None = None) -> int:
        """As `Store.put`. An object in place of another counts the difference.

        Raises:
            OverQuota: nothing of it is kept. If only its head is too much, that shows once it is put; then
                what it replaced is gone too.
        """
        owner, size = item.label.address.owner, len(item.payload)
        with self._lock:
            account = self._accounts.setdefault(owner, _Account())
        with account.changed:
            while not self._fits(account, item):
                if not account.putting:
                    raise OverQuota(f"{size} bytes more than the owner's {self.limit(owner)}")
                account.changed.wait()  # what is being put may be counted twice, or may fail
            account.putting += size
        taken = 0
        try:
            taken = self.inner.put(item, ttl)
        finally:
            with account.changed:
                account.putting -= size
                account.used = (account.used or 0) + taken
                account.changed.notify_all()
        with account.changed:
            if account.used > self.limit(owner) and self._look(account, owner) > self.limit(owner):
                self.inner.delete([item.label.address])
                raise OverQuota(f"{taken} bytes more than the owner's {self.limit(owner)}")
        return taken

    def _fits(self, account: _Account, item: Item) -> bool:
        """Whether a payload is within the limit: by our own count, or by what is really there."""
        address, size = item.label.address, len(item.payload)
        most = self.limit(address.owner) - account.putting - size
        if account.used is not None and account.used <= most:
            return True
        used = self._look(account, address.owner)
        if used <= most:
            return True
        there = self.inner.scan(address.owner, address.namespace)
        replaced = next((entry.nbytes for entry in there if entry.address == address), 0)
        return used - replaced <= most

    def _look(self, account: _Account, owner: bytes) -> int:
        account.used = self.inner.stats(owner).nbytes
        return account.used
