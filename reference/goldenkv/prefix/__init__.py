"""Prefixes: under which names their state is stored and found, and what of them is there.

`identity` and `keys` have the names, `radix` the tree, `strategies` and `prefetch` the order in which things
leave it and come back.
"""

from .identity import (
    IdentityError,
    Namespace,
    Public,
    PublicDomains,
    Tenant,
    TensorParallel,
    UndeclaredDomain,
    content_digest,
    owner_of,
)
from .keys import Change, Event, PageKeys
from .prefetch import SpeculativePrefetch
from .radix import RadixTree
from .strategies import LRU, Composite, FadingSelection, SelectionDriven, Strategy, StrategyError, Victim
from .tree.answers import (
    BadBoundary,
    BadLength,
    BadPages,
    BadTokens,
    Evicted,
    Inserted,
    Lock,
    Match,
    NamespaceInUse,
    NotLocked,
    NotWritten,
    RadixError,
    StaleMatch,
    Tail,
)
from .tree.checks import Stats
from .tree.node import Write
from .tree.writes import Written

__all__ = [
    "LRU",
    "BadBoundary",
    "BadLength",
    "BadPages",
    "BadTokens",
    "Change",
    "Composite",
    "Event",
    "Evicted",
    "FadingSelection",
    "IdentityError",
    "Inserted",
    "Lock",
    "Match",
    "Namespace",
    "NamespaceInUse",
    "NotLocked",
    "NotWritten",
    "PageKeys",
    "Public",
    "PublicDomains",
    "RadixError",
    "RadixTree",
    "SelectionDriven",
    "SpeculativePrefetch",
    "StaleMatch",
    "Stats",
    "Strategy",
    "StrategyError",
    "Tail",
    "Tenant",
    "TensorParallel",
    "UndeclaredDomain",
    "Victim",
    "Write",
    "Written",
    "content_digest",
    "owner_of",
]
