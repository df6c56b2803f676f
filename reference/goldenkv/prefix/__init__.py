"""Prefixes: under which names their state is stored and found (`identity`, `keys`)."""

from .identity import (
    IdentityError,
    Namespace,
    Public,
    PublicDomains,
    Tenant,
    TensorParallel,
    UndeclaredDomain,
    content_digest,
)
from .keys import Change, Event, PageKeys

__all__ = [
    "Change",
    "Event",
    "IdentityError",
    "Namespace",
    "PageKeys",
    "Public",
    "PublicDomains",
    "Tenant",
    "TensorParallel",
    "UndeclaredDomain",
    "content_digest",
]
