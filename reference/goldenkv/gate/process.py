"""Other processes of the reload gate: they know a model by its source, and state by files."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..config import ModelConfig, Numerics, bench
from ..engine import Engine, Sequence, TieredCache
from ..model.checkpoint import load_checkpoint
from ..model.weights import Model
from ..prefix import Namespace, Tenant, TensorParallel
from ..state import Rows, Snapshot
from ..tiers.disk import DiskStore
from ..tiers.disk_files import Step
from ..tiers.mover import Mover
from ..tiers.shelf import Tier
from ..tiers.store import Store

PATIENCE = 60.0
"""Seconds that a load may take: how fast it is is not what the gate asks."""


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


def namespace_of(engine: Engine) -> Namespace:
    """What the gate's state is stored under in a prefix cache."""
    return Namespace(
        domain=Tenant("gate", None), model=engine.fingerprint, tokenizer=None, chat_template=None,
        layout="pool", page_size=engine.geometry.page_size, dtype=engine.numerics.dtype,
        tensor_parallel=TensorParallel(1, 0, "none"), adapter=None, media=(), salt=None,
    )  # fmt: skip


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
        _in_a_process("serve_restore", source, folder=folder, tokens=tokens)
        return _results(folder)


def serve_restore() -> None:
    """What the second process runs: an order from standard input, results beside the state."""
    order, source = _order()
    folder = Path(order["folder"])
    config, model = source.load()
    snapshot = Snapshot.load(folder / "state.safetensors")
    longest = min(2 * (snapshot.length + len(order["tokens"])), config.max_position_embeddings)
    engine = Engine(
        model, config, source.numerics, slots=2, max_length=longest, page_size=2 * config.alignment
    )
    seq = engine.restore(snapshot)
    _decode(engine, seq, order["tokens"], folder)


def store_and_die(source: ModelSource, tokens: np.ndarray, folder: str) -> None:
    """A fresh interpreter runs a prompt and stores it in a folder, until it kills itself in a put (kill -9).

    Raises:
        RuntimeError: it ended in another way.
    """
    _in_a_process("serve_store", source, folder=folder, tokens=tokens.tolist(), ends=-signal.SIGKILL)


def serve_store() -> None:
    """What that process runs: it dies when two thirds of the pages are renamed, in a rename."""
    order, source = _order()
    engine = _engine(source, len(order["tokens"]))
    objects = 2 * (len(order["tokens"]) // engine.geometry.page_size)  # a page and a boundary state each
    renamed = itertools.count(1)

    def die(step: Step) -> None:
        if step is Step.RENAMED and next(renamed) > objects * 2 // 3:
            os.kill(os.getpid(), signal.SIGKILL)

    # One object after the other, so that it is always the same ones that are whole.
    one = ThreadPoolExecutor(1)
    with _tiered(engine, DiskStore(order["folder"], at=die), one) as cache:
        request = cache.begin(namespace_of(engine), order["tokens"])
        cache.run(request)
        cache.mover.drain()


def reload_elsewhere(
    source: ModelSource, tokens: np.ndarray, folder: str, decoded: list[int]
) -> tuple[tuple[Rows, Rows, np.ndarray], int, int]:
    """A fresh interpreter opens the folder of a disk tier, serves a prompt from it, and decodes.

    Returns:
        Rows and logits as `restore_elsewhere`; tokens that were not run; payload bytes that were read.

    Raises:
        RuntimeError: the process failed; its message is in the error.
    """
    with tempfile.TemporaryDirectory() as results:
        told = json.loads(
            _in_a_process(
                "serve_reload", source, folder=folder, prompt=tokens.tolist(), tokens=decoded, results=results
            )
        )
        return _results(results), told["reused"], told["bytes"]


def serve_reload() -> None:
    """What that process runs."""
    order, source = _order()
    prompt, folder = order["prompt"], Path(order["results"])
    engine = _engine(source, len(prompt) + len(order["tokens"]))
    with _tiered(engine, DiskStore(order["folder"])) as cache:
        request = cache.begin(namespace_of(engine), prompt)
        cache.run(request)
        _decode(engine, request.seq, order["tokens"], folder)
        moved = cache.mover.metrics.to_json()["moved_bytes"]["disk"].get("get", 0)
    reused = 0 if request.plan is None else request.plan.start
    print(json.dumps({"reused": reused, "bytes": moved}))


# What the processes share ----------------------------------------------------------------------------------


def _in_a_process(function: str, source: ModelSource, *, ends: int = 0, **order: object) -> str:
    """Runs a function of this module in a fresh interpreter. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"from goldenkv.gate import process; process.{function}()"],
        input=json.dumps({"source": asdict(source), **order}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != ends:
        raise RuntimeError(
            f"another process ended with {done.returncode}, not {ends}:\n{done.stderr.strip()}"
        )
    return done.stdout


def _order() -> tuple[dict, ModelSource]:
    """What this process was told, and the source of its model."""
    order = json.load(sys.stdin)
    source = order.pop("source")
    return order, ModelSource(Numerics(**source.pop("numerics")), **source)


def _engine(source: ModelSource, longest: int) -> Engine:
    config, model = source.load()
    pages = -(-longest // config.alignment)
    return Engine(model, config, source.numerics, slots=2, max_length=longest, boundaries=pages)


@contextmanager
def _tiered(engine: Engine, store: Store, workers: Executor | None = None) -> Iterator[TieredCache]:
    mover = Mover([Tier(store=store)], engine.geometry.page_size, workers=workers)
    yield TieredCache(engine, mover, deadline=lambda tokens: PATIENCE)
    mover.close()


def _decode(engine: Engine, seq: Sequence, tokens: list[int], folder: Path) -> None:
    """Leaves the state before, the state after, and the logits of every step in a folder."""
    engine.snapshot(seq).save(folder / "restored.safetensors", engine.config)
    logits = np.array([engine.decode(seq, token) for token in tokens])
    engine.snapshot(seq).save(folder / "end.safetensors", engine.config)
    np.save(folder / "logits.npy", logits)


def _results(folder: str) -> tuple[Rows, Rows, np.ndarray]:
    """What `_decode` left."""
    before, after = (Snapshot.load(Path(folder) / f"{when}.safetensors").rows for when in ("restored", "end"))
    return before, after, np.load(Path(folder) / "logits.npy")
