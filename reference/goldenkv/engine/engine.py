"""One engine: it owns weights and a pool, and runs sequences tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Sequence as Tokens

import jax
import numpy as np

from ..config import ModelConfig, Numerics
from ..model import mtp
from ..model.core import core_of
from ..model.tile import Probe, run_tile
from ..model.weights import Model
from ..state.fingerprint import fingerprint, weights_digest
from ..state.pool import Geometry
from ..state.snapshot import Snapshot
from .sampling import checked_tokens
from .sequences import Sequences
from .slots import Sequence


class Engine(Sequences):
    """Runs a model over sequences that share one pool of device state.

    Args:
        model: the weights.
        config: what they are.
        numerics: how to compute; part of the fingerprint.
        slots: sequences that can live at once.
        max_length: the most tokens of a sequence.
        pages: pages shared by all sequences; enough for every slot at its maximum by default.
        page_size: tokens a page, a multiple of `config.alignment`, which is the default.
        rollback: the most tokens that `rollback` can take back.
        boundaries: boundary states that `save_boundary` can keep.
        fill: what the pool holds before anything is written. No bit of any result depends on it.
        poison: fill freed pages and boundary states with NaN: shows a use after freeing.

    Raises:
        ValueError: sizes that do not fit the configuration, or an implementation that is not installed.
    """

    aligned = True
    """Tiles start at multiples of their size."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        numerics: Numerics | None = None,
        *,
        slots: int = 1,
        max_length: int = 4096,
        pages: int | None = None,
        page_size: int | None = None,
        rollback: int = 8,
        boundaries: int = 0,
        fill: float = 0.0,
        poison: bool = False,
    ) -> None:
        numerics = numerics or Numerics()
        numerics.check(config)
        core_of(numerics)
        if not 1 <= max_length <= config.max_position_embeddings:
            raise ValueError(
                f"{max_length=} must lie in 1 .. {config.max_position_embeddings} (the model's positions)"
            )
        page_size = config.alignment if page_size is None else page_size
        self._table_size = -(-max_length // max(1, page_size))
        geometry = Geometry(
            slots=slots,
            pages=slots * self._table_size if pages is None else pages,
            page_size=page_size,
            tile=self._largest_tile(numerics),
            rollback=rollback,
            boundaries=boundaries,
            aligned=self.aligned,
        )
        leaves, self._structure = jax.tree.flatten(model)
        self._leaves = tuple(leaves)
        super().__init__(config, numerics, geometry, max_length, fill=fill, poison=poison)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of the configuration, the weights and the numerics; state under another one is a miss."""
        return fingerprint(self.config, self.numerics, weights_digest(self._leaves))

    # Computing -----------------------------------------------------------------------------------------

    def prefill(
        self,
        seq: Sequence,
        tokens: Tokens[int] | np.ndarray,
        chunk_plan: Tokens[int] | None = None,
        *,
        all_logits: bool = False,
    ) -> np.ndarray:
        """Appends tokens to a sequence.

        Args:
            seq: any length, also one that was restored or decoded.
            tokens: ids, at least one.
            chunk_plan: lengths that sum to the number of tokens: how the work is cut. It changes no bit.
            all_logits: return the logits of every token instead of the last.

        Returns:
            Float32 logits, [vocabulary], or [tokens, vocabulary] with `all_logits`.

        Raises:
            ValueError: no tokens, an id outside the vocabulary, or a plan that does not sum up.
            CapacityError: past `max_length`, or out of pages. The sequence is unchanged.
        """
        ids = checked_tokens(tokens, self.config.vocab_size)
        plan = [len(ids)] if chunk_plan is None else list(chunk_plan)
        if sum(plan) != len(ids) or min(plan) < 1:
            raise ValueError(f"chunk_plan must hold positive lengths that sum to {len(ids)}, got {plan}")
        self.reserve([(seq, seq.length + len(ids))])
        logits, done = [], 0
        for size in plan:
            for live, tile_logits, _ in self._run(seq, ids[done : done + size], probe=False):
                logits.append((live, tile_logits))
                if not all_logits:
                    del logits[:-1]
            done += size
        rows = np.concatenate([np.asarray(tile_logits)[live] for live, tile_logits in logits])
        return rows if all_logits else rows[-1]

    def decode(self, seq: Sequence, token: int) -> np.ndarray:
        """Appends one token; the float32 logits [vocabulary] that follow it. Errors as `prefill`."""
        return self.prefill(seq, [token])

    def prefill_batch(self, work: Tokens[tuple[Sequence, Tokens[int] | np.ndarray]]) -> list[np.ndarray]:
        """Appends tokens to several sequences of any lengths, tile by tile in turn.

        Returns:
            The last logits of each, as `prefill`. An empty batch gives an empty list.

        Raises:
            ValueError: as `prefill`, or a sequence that appears twice.
            CapacityError: as `prefill`. No sequence has changed.
        """
        if len({id(seq) for seq, _ in work}) != len(work):
            raise ValueError("a sequence appears twice in the batch")
        checked = [(seq, checked_tokens(tokens, self.config.vocab_size)) for seq, tokens in work]
        self.reserve([(seq, seq.length + len(ids)) for seq, ids in checked])
        running = {i: self._run(seq, ids, probe=False) for i, (seq, ids) in enumerate(checked)}
        last: dict[int, tuple[slice, jax.Array]] = {}
        while running:
            for i in list(running):
                step = next(running[i], None)
                if step is None:
                    del running[i]
                else:
                    last[i] = step[:2]
        return [np.asarray(last[i][1])[last[i][0]][-1] for i in range(len(checked))]

    def decode_batch(self, work: Tokens[tuple[Sequence, int]]) -> list[np.ndarray]:
        """One decode step for each of several sequences; as `prefill_batch`."""
        return self.prefill_batch([(seq, [token]) for seq, token in work])

    def replay(self, seq: Sequence, tokens: Tokens[int] | np.ndarray, *, exact: bool = True) -> None:
        """Runs tokens again whose entries an adopted sequence has in its pages already.

        Args:
            seq: from `adopt`, at its start.
            tokens: from where it stands to where its pages end; none if it stands there.
            exact: False where they are too few: the sequence is then marked, and its state stays with it.

        Raises:
            ValueError: another number of tokens.
        """
        self._slots.check(seq)
        if seq.length + len(tokens) != seq.kept:
            raise ValueError(f"{len(tokens)} tokens from {seq.length} on do not end at {seq.kept}")
        if len(tokens):
            self.prefill(seq, tokens)
        seq.restored, seq.exact = seq.length, exact

    def prefill_probed(self, seq: Sequence, tokens: Tokens[int] | np.ndarray) -> tuple[np.ndarray, Probe]:
        """As `prefill` with `all_logits`, and what was computed on the way (see `Probe`), as numpy arrays.

        It runs a program of its own, so compare its values with tolerances, not bits.
        """
        ids = checked_tokens(tokens, self.config.vocab_size)
        self.reserve([(seq, seq.length + len(ids))])
        steps = [
            (np.asarray(logits)[live], jax.tree.map(lambda a, live=live: np.asarray(a)[live], probe))
            for live, logits, probe in self._run(seq, ids, probe=True)
        ]
        probe = jax.tree.map(lambda *parts: np.concatenate(parts), *(p for _, p in steps))
        return np.concatenate([logits for logits, _ in steps]), probe

    def _run(
        self, seq: Sequence, ids: np.ndarray, *, probe: bool
    ) -> Iterator[tuple[slice, jax.Array, Probe | None]]:
        """Runs the tiles of one chunk; yields each tile's live rows, logits and probe."""
        done = 0
        while done < len(ids):
            first, size = self._tile_at(seq.length, len(ids) - done)
            fresh = ids[done : done + first + size - seq.length]
            live = slice(seq.length - first, seq.length - first + len(fresh))
            tile = np.zeros(size, np.int32)
            tile[live] = fresh
            yield live, *self._tile(seq, tile, seq.length + len(fresh), probe=probe)
            done += len(fresh)

    @staticmethod
    def _largest_tile(numerics: Numerics) -> int:
        return numerics.tile

    def _tile_at(self, length: int, remaining: int) -> tuple[int, int]:
        """(first position, size) of the tile that takes the next tokens of a sequence."""
        size = self.numerics.tile
        return length // size * size, size

    def _tile(
        self, seq: Sequence, tokens: np.ndarray, end: int, *, probe: bool
    ) -> tuple[jax.Array, Probe | None]:
        """Runs one tile that extends `seq` to `end` tokens."""
        table = np.full(self._table_size, self.geometry.pages, np.int32)
        table[: len(seq.pages)] = seq.pages
        self._pool, logits, seen = run_tile(
            self._leaves,
            self._pool,
            tokens,
            np.int32(seq.length),
            np.int32(end),
            np.int32(seq.slot),
            table,
            np.int32(seq.since),
            np.int32(seq.kept),
            structure=self._structure,
            config=self.config,
            numerics=self.numerics,
            aligned=self.aligned,
            probe=probe,
        )
        self._slots.advance(seq, end)
        return logits, seen

    # Drafts --------------------------------------------------------------------------------------------

    def draft(self, seq: Sequence, token: int, count: int) -> list[int]:
        """Guesses what follows `token`, which comes next but is not in the sequence yet. Changes nothing.

        Args:
            seq: at least one token long.
            token: the next token.
            count: guesses, at most `rollback` of this engine.

        Raises:
            ValueError: the model has no MTP layer, or an argument is out of range.
        """
        self._slots.check(seq)
        most = self.geometry.rollback
        if not self.config.num_nextn_predict_layers:
            raise ValueError("the model has no MTP layer (num_nextn_predict_layers=0), so it cannot draft")
        if seq.length < 1 or not 0 <= count <= most:
            raise ValueError(f"{count=} must lie in 0 .. {most} (rollback), after at least one token")
        checked_tokens([token], self.config.vocab_size)
        at = np.int32(token), np.int32(seq.length), np.int32(seq.slot), np.int32(count)
        fixed = dict(structure=self._structure, config=self.config, numerics=self.numerics, most=most)
        return np.asarray(mtp.draft(self._leaves, self._pool[-1], *at, **fixed))[:count].tolist()

    # State ---------------------------------------------------------------------------------------------

    def snapshot(self, seq: Sequence) -> Snapshot:
        """The minimal exact state, with the fingerprint under which it is valid.

        Raises:
            ApproximateState: the sequence was replayed too short.
        """
        self.check_exact(seq)
        return Snapshot(self.fingerprint, seq.length, self.rows(seq))

    def restore(self, snapshot: Snapshot) -> Sequence:
        """A new sequence that continues where the snapshot was taken.

        Raises:
            ForeignSnapshot, IncompleteSnapshot: it does not belong here. Nothing was written.
            CapacityError: no slot, no pages, or longer than `max_length`. Nothing was written.
        """
        snapshot.check(self.config, self.numerics, self.fingerprint)
        return self._write_rows(snapshot.length, snapshot.rows)
