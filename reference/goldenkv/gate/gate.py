"""All lines of the gate, and running them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import controls, paths, tiers
from .cold import ColdRun
from .report import Report, Result


class Gate(ColdRun):
    """Runs the paths and controls over one prompt; arguments as `ColdRun`."""

    plans = 5

    @property
    def names(self) -> list[str]:
        """The lines, in the order in which to run them."""
        return list(self._lines())

    @property
    def about(self) -> dict:
        """What was run."""
        return {
            "model": self.source.checkpoint or f"bench preset, random weights of seed {self.source.seed}",
            "tokens": len(self.tokens),
            "steps": self.steps,
            "fingerprint": self.engine.fingerprint,
            "numerics": self.source.numerics.identity(),
        }

    def run_line(self, name: str) -> Result:
        """Runs one of `names`."""
        return self._lines()[name](self)

    def run(self) -> Report:
        """Runs every line."""
        return Report(self.about, [self.run_line(name) for name in self.names])

    def _lines(self) -> dict[str, Callable[[ColdRun], Result]]:
        plans = {f"chunk plan {n}": partial(paths.chunk_plan, n) for n in range(1, self.plans + 1)}
        policies = {f"policy: {name}": partial(paths.policy, name) for name in paths.POLICIES}
        return (
            {"cold, once more": paths.cold_again}
            | plans
            | {
                "batch with 2 strangers": paths.batch,
                "fork of a fork": paths.fork,
                "drafts rolled back": paths.drafts,
                "restore: host memory": paths.host,
                "restore: disk": paths.disk,
                "restore: new process": paths.new_process,
            }
            | policies
            | tiers.lines(self)
            | controls.lines(self)
        )
