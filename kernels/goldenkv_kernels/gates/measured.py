"""What `kernels/bench.py` wrote on a machine with a GPU, where somebody has run it there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .roofline import BYTES_A_SECOND, OPERATIONS_A_SECOND


@dataclass(frozen=True, slots=True)
class Timed:
    """One function at one size, with one implementation.

    Attributes:
        usual: whether it is the size for which a target is set.
        intensity: operations a byte.
        seconds: the median of its calls.
        share: of the floor: 1 is as fast as the two floors allow.
    """

    name: str
    size: str
    implementation: str
    usual: bool
    intensity: float
    seconds: float
    share: float

    @property
    def operations_a_second(self) -> float:
        """Of matrix products."""
        return self.share * min(self.intensity * BYTES_A_SECOND, OPERATIONS_A_SECOND)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the benchmark: the GPU, the version of JAX, and every point that was timed."""

    device: str
    jax: str
    points: tuple[Timed, ...]


def read_measured(path: Path) -> Measured | None:
    """The committed run, or None if there is none.

    Raises:
        ValueError: the file is not what the benchmark writes, or nothing may be concluded from it: a dry run,
            or one in which a kernel was wrong.
    """
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        if data["dry_run"]:
            raise ValueError(f"{path.name} is of a dry run, in which nothing is timed")
        wrong = [item for item in (*data["numerics"], *data["points"]) if item["problem"]]
        if wrong:
            raise ValueError(f"{path.name} is of a run in which kernels failed, the first: {wrong[0]}")
        names = Timed.__dataclass_fields__
        points = tuple(Timed(**{name: point[name] for name in names}) for point in data["points"])
        return Measured(data["device"], data["jax"], points)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} must be written by kernels/bench.py --json ({error!r})") from error
