"""Tiers: where state goes when it leaves the device, and how it comes back.

`store` has the protocol and `objects` what is stored. Stores: `host`, `device`, `disk`, and on other machines
`redis`, `objectstore`, `mooncake`. Wrappers: `seal` encrypts, `quota` limits, `parts` splits, `coded` keeps
delta frames, `faults` breaks. `mover` copies between the device and a list of tiers; `shelf` is one of them
at work.
"""

from .coded import Coded, LossyCodec
from .disk import DiskStore
from .errors import (
    Corrupt,
    Expired,
    Foreign,
    Full,
    Late,
    Missing,
    OverQuota,
    ReadOnly,
    StoreError,
    Truncated,
    Unavailable,
    Unreadable,
)
from .faults import Faulty
from .host import HostStore
from .keyring import KeyRing
from .metrics import TierMetrics
from .mover import Mover
from .objects import Address, Head, Item, Kind, Label, Tensor
from .parts import Parts
from .quota import Quota
from .redis import RedisStore
from .seal import Sealed
from .server import RedisServer
from .shelf import Tier, Write
from .store import Entry, Stats, Store, VerifiedStore, Wrapper

__all__ = [
    "Address",
    "Coded",
    "Corrupt",
    "DiskStore",
    "Entry",
    "Expired",
    "Faulty",
    "Foreign",
    "Full",
    "Head",
    "HostStore",
    "Item",
    "KeyRing",
    "Kind",
    "Label",
    "Late",
    "LossyCodec",
    "Missing",
    "Mover",
    "OverQuota",
    "Parts",
    "Quota",
    "ReadOnly",
    "RedisServer",
    "RedisStore",
    "Sealed",
    "Stats",
    "Store",
    "StoreError",
    "Tensor",
    "Tier",
    "TierMetrics",
    "Truncated",
    "Unavailable",
    "Unreadable",
    "VerifiedStore",
    "Wrapper",
    "Write",
]
