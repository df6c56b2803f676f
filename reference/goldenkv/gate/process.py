"""The second process of the reload gate: it knows a model by its source, and state by a file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..config import ModelConfig, Numerics, bench
from ..engine import Engine
from ..model.checkpoint import load_checkpoint
from ..model.weights import Model
from ..state import Rows, Snapshot


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the weights come from: a checkpoint folder, or the bench preset with seeded random weights.

    A second process can be told the same source in a line of JSON.
    """

    numerics: Numerics = field(default_factory=Numerics)
    checkpoint: str | None = None
    seed: int = 0

    def load(self) -> tuple[ModelConfig, Model]:
        if self.checkpoint is not None:
            return load_checkpoint(self.checkpoint, numerics=self.numerics)
        return bench(), Model(bench(), self.numerics, self.seed)


def restore_elsewhere(
    source: ModelSource, snapshot: Snapshot, config: ModelConfig, tokens: list[int]
) -> tuple[Rows, Rows, np.ndarray]:
    """Restores a snapshot in a fresh interpreter, through a file, and decodes `tokens` there.

    Returns:
        The rows right after the restore, the rows at the end, and the logits after each token.

    Raises:
        RuntimeError: the process failed; its message is in the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        snapshot.save(Path(folder) / "state.safetensors", config)
        order = {"folder": folder, "source": asdict(source), "tokens": tokens}
        done = subprocess.run(
            [sys.executable, "-c", "from goldenkv.gate import process; process.serve_restore()"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the second process failed:\n{done.stderr.strip()}")
        rows = [Snapshot.load(Path(folder) / f"{when}.safetensors").rows for when in ("restored", "end")]
        return rows[0], rows[1], np.load(Path(folder) / "logits.npy")


def serve_restore() -> None:
    """What the second process runs: an order from standard input, results beside the state."""
    order = json.load(sys.stdin)
    folder, source = Path(order["folder"]), order["source"]
    source = ModelSource(Numerics(**source.pop("numerics")), **source)
    config, model = source.load()
    snapshot = Snapshot.load(folder / "state.safetensors")
    longest = min(2 * (snapshot.length + len(order["tokens"])), config.max_position_embeddings)
    engine = Engine(
        model, config, source.numerics, slots=2, max_length=longest, page_size=2 * config.alignment
    )
    seq = engine.restore(snapshot)
    engine.snapshot(seq).save(folder / "restored.safetensors", config)
    logits = np.array([engine.decode(seq, token) for token in order["tokens"]])
    engine.snapshot(seq).save(folder / "end.safetensors", config)
    np.save(folder / "logits.npy", logits)
