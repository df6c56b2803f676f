"""What a reload policy costs in a conversation: states kept, tokens run again. And are its bits right?

`converse` holds a conversation over a cache and compares every turn with a cold run. `foresee` says from the
policy alone what that will count, for a model of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .config import ModelConfig, Numerics
from .engine import Engine, PrefixCache, ReloadPolicy
from .engine.policies import End
from .prefix import Namespace
from .state import Rows, cells, compare
from .state.formats import element_type


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a conversation counts.

    Attributes:
        prompt: tokens of its prompt, everything said before included.
        reused, replayed, computed: of these, not run; run again although their entries were there; run for
            the first time.
        kept: positions of the boundary states that the cache has of the conversation after the turn.
        exact: False where the policy says that its plan was approximate.
    """

    prompt: int
    reused: int
    replayed: int
    computed: int
    kept: tuple[int, ...]
    exact: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A turn that ran.

    Attributes:
        turn: what it counted.
        equal: state and logits after the prompt have the bits of a cold run.
        logit_error: the largest absolute difference of a logit there.
        reply: the tokens that were decoded, the greedy choice each.
    """

    turn: Turn
    equal: bool
    logit_error: float
    reply: tuple[int, ...]


def converse(
    cache: PrefixCache, namespace: Namespace, said: Sequence[np.ndarray], reply: int, cold: Engine
) -> list[Measured]:
    """A conversation: each prompt is everything before it and what is said next; replies are greedy.

    Args:
        cache: with nothing of this conversation in it, and room for all of it.
        namespace: of the conversation.
        said: token ids, one array a turn.
        reply: tokens that are decoded after each prompt.
        cold: another engine over the same weights, with a free slot; it runs each prompt from nothing.
    """
    history = np.zeros(0, np.int32)
    out = []
    for words in said:
        prompt = np.concatenate([history, words])
        before = replace(cache.metrics)
        request = cache.begin(namespace, prompt)
        logits = cache.run(request)
        counted = [getattr(cache.metrics, n) - getattr(before, n) for n in ("reused", "replayed", "computed")]
        equal, error = _against_cold(cold, prompt, cache.engine.rows(request.seq), logits)
        spoken = []
        for _ in range(reply):
            spoken.append(int(logits.argmax()))
            logits = cache.decode(request, spoken[-1])
        cache.finish(request)
        history = np.concatenate([prompt, np.array(spoken, np.int32)])
        exact = request.plan is None or request.plan.exact
        kept = kept_positions(cache, namespace, history)
        turn = Turn(len(prompt), counted[0], counted[1], counted[2], kept, exact)
        out.append(Measured(turn, equal, error, tuple(spoken)))
    return out


def foresee(
    config: ModelConfig, policy: ReloadPolicy, page_size: int, turns: Sequence[tuple[int, int]]
) -> list[Turn]:
    """What `converse` will count: nothing runs, only the policy is asked.

    Args:
        config: of any size.
        policy: of the cache.
        page_size: tokens a page.
        turns: (tokens said, tokens of the reply), one pair a turn.
    """
    policy.check(page_size)
    length = paged = 0
    kept: set[int] = set()
    out = []
    for words, reply in turns:
        prompt, end = length + words, length + words + reply
        # Whole pages, or the partial one behind them if the state at its end was kept.
        found = max((position for position in kept if position > paged), default=paged)
        plan = policy.plan(config, found, [(position, 0) for position in sorted(kept) if position <= found])
        reused, resumed = (0, 0) if plan is None else (plan.start, plan.length)
        exact = plan is None or plan.exact
        if exact:  # what is approximate is not kept
            ran = range(resumed + 1, end + 1)
            kept |= {p for p in ran if policy.keeps(p, _ends(p, prompt, end, page_size))}
            paged = end // page_size * page_size
        out.append(Turn(prompt, reused, resumed - reused, prompt - resumed, tuple(sorted(kept)), exact))
        length = end
    return out


def kept_positions(cache: PrefixCache, namespace: Namespace, tokens: np.ndarray) -> tuple[int, ...]:
    """Where the cache has boundary states of these tokens, also within pages that were filled since."""
    found: set[int] = set()
    # Of the states within a page a match has one, the last before its prompt ends: so every end is asked.
    for end in range(1, len(tokens) + 1):
        found |= {p for p, _ in cache.tree.match(namespace.digest(), tokens[:end]).boundaries}
    return tuple(sorted(found))


def boundary_bytes(config: ModelConfig, numerics: Numerics, length: int) -> int:
    """Bytes of the rows that one boundary state holds at a length."""
    return sum(
        int(np.prod(cell.shape(config, length))) * element_type(cell.component.dtype(numerics)).itemsize
        for cell in cells(config)
        if not cell.component.paged
    )


def _ends(position: int, prompt: int, end: int, page_size: int) -> frozenset[End]:
    ends = {End.PAGE: position % page_size == 0, End.PROMPT: position == prompt, End.OUTPUT: position == end}
    return frozenset(name for name, here in ends.items() if here)


def _against_cold(cold: Engine, prompt: np.ndarray, rows: Rows, logits: np.ndarray) -> tuple[bool, float]:
    seq = cold.open()
    expected = cold.prefill(seq, prompt)
    difference = compare(rows | {"logits": logits[None]}, cold.rows(seq) | {"logits": expected[None]})
    cold.close(seq)
    return difference.same, float(np.abs(logits - expected).max())
