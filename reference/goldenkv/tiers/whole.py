"""For stores that hand over an object in one piece, as one value under one name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .errors import Corrupt, Truncated
from .objects import head_size


def unpack(value: memoryview, allot: Callable[[bytes], np.ndarray]) -> None:
    """Takes a value apart and copies its payload to where `allot` says; see `VerifiedStore._read`.

    Raises:
        Truncated, Corrupt: it is shorter, or longer, than its head says.
    """
    size = head_size(value[:8], len(value))
    payload = allot(bytes(value[:size]))
    found = len(value) - size
    if found != len(payload):
        error = Truncated if found < len(payload) else Corrupt
        raise error(f"a payload of {found} bytes, its head says {len(payload)}")
    payload[:] = np.frombuffer(value, np.uint8, offset=size) if found else 0
