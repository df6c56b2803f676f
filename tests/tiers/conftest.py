"""A real server of the Redis protocol: one for all tests of a process, and names of its own for each test."""

import uuid
from collections.abc import Iterator

import pytest

from goldenkv.errors import MissingExtra
from goldenkv.tiers.redis import RedisStore
from goldenkv.tiers.server import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Shared: do not stop it, and do not change its configuration."""
    try:
        server = RedisServer()
    except MissingExtra as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def redis_store(redis_server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(redis_server.client(), uuid.uuid4().hex.encode())
    yield store
    store.close()
