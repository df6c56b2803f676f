# %% [markdown]
# # Reload policies
#
# A cache that has the pages of a prompt has its entries, and they are most of the bytes. It does not yet have a
# sequence that can go on. For that it needs the *boundary* state at the place where the prompt ends: windows,
# overlap, rows of unfinished blocks (`02_reload_gate`). There are two ways to get it:
#
# - **keep** it: bytes, at every place where somebody may want to go on,
# - **make it again**: run some of the last tokens once more. This is called **replay**.
#
# How many tokens must a replay run? This notebook measures it. Too few do not raise an error: the answer is only
# slightly wrong. Then it compares the policies of the V4 report on a conversation: what each keeps, what each runs
# again, and whether the bits are right.
#
# The model is small and its weights are random: windows of 8 tokens, CSA blocks of 4, HCA blocks of 8, five layers
# and an MTP layer, which drafts tokens. In V4 these are 128, 4, 128, 43 and 1.

# %%
import codecs
import this
from dataclasses import replace

import numpy as np

from goldenkv import figures
from goldenkv.capacity import read_model, snapshot_bytes
from goldenkv.config import Numerics, flash, micro, pro, with_mtp
from goldenkv.conversation import boundary_bytes, converse, foresee
from goldenkv.engine import (
    ApproximateState,
    EndPoints,
    Engine,
    Full,
    OneWindow,
    Periodic,
    PrefixCache,
    Zero,
    replay_length,
)
from goldenkv.figures import decimal_size as size
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.replay_study import exact_rows, replay_errors
from goldenkv.text import byte_tokens

# %%
PAGE, LENGTH = 16, 96
numerics = Numerics(tile=8, index_block=8, key_block=8)


def new_engine(model, config):
    sizes = dict(slots=2, max_length=416, page_size=PAGE, pages=64, boundaries=40)
    return Engine(model, config, numerics, **sizes)


config = with_mtp(replace(micro(), vocab_size=256, num_hidden_layers=5, compress_ratios=(0, 4, 8, 4, 8)))
model = Model(config, numerics, seed=0)
engine = new_engine(model, config)
text = byte_tokens(codecs.decode(this.s, "rot13"), config.vocab_size)
W, L = config.sliding_window, config.num_hidden_layers
print("layers:", ", ".join(f"{layer} {config.kind(layer).name}" for layer in config.state_layers))

# %% [markdown]
# ## 1. How far back?
#
# A prompt of 96 tokens has run once, from nothing ("cold"). Its pages are kept, its boundary state is not. We replay
# the last n tokens over these pages, for every n, and compare with the cold run: all boundary rows of each layer, and
# the logits of the tokens that follow. (A replay reads entries and never writes them: they are right already.)

# %%
following = LENGTH + 12
errors = replay_errors(engine, text[:following], LENGTH, range(1, L * (W - 1) + W + 4))
figure = figures.replay_error_figure(config, errors)

# %% [markdown]
# The error falls, but it does not become zero where one would expect it. One window, 8 tokens, is exact for the first
# layer only. Each further layer needs 7 tokens more.
#
# Why? A window row is made from the layer's *input*. In layer 0 this is the token itself. In layer 1 it is what layer
# 0 made of the token *and of the window before it*: 7 tokens back. Layer 2 needs the 7 rows of layer 1 before its own,
# and each of them needs 7 of layer 0. So the reach adds up, **window after window, layer after layer**:
#
# > **L (W - 1)** tokens make the state of L layers exact.
#
# Compressed entries do not make it longer: they are in the pages, exact whatever the replay does.
#
# The picture below shows the same within two replays: which row of which layer is exact. The box is round what the hit
# needs: the last 7 rows of each layer.

# %%
enough = replay_length(config, LENGTH)
long = exact_rows(engine, text[:following], LENGTH, enough)
short = exact_rows(engine, text[:following], LENGTH, W)
figure = figures.exact_rows_figure(
    config,
    {f"{enough} tokens run again: all rows in the box are exact": long, f"one window, {W} tokens": short},
)

# %% [markdown]
# The **MTP layer** needs one window more, and then one token: it makes the row of a token when the *next* one comes,
# so it is one token behind. That is L (W - 1) + W. The logits do not need it (the red dotted line ends where layer 4
# does), but what the layer drafts does.
#
# Is it always window x layers? The same for a window of 16 and three layers. For each layer: the fewest tokens after
# which all its rows have the right bits, measured.

# %%
wide = replace(micro(), vocab_size=256, num_hidden_layers=3, compress_ratios=(0, 4, 8), sliding_window=16)
wide_engine = new_engine(Model(wide, numerics, seed=0), wide)
wide_errors = replay_errors(wide_engine, text[:following], LENGTH, range(1, 3 * 15 + 3))


def fewest(errors):
    """For each layer, and for the logits: the first count from which on no bit is wrong."""
    wrong = np.array([(*error.wrong_rows, not error.logits_equal) for error in errors], bool)
    return [errors[int(np.flatnonzero(column).max()) + 1].count for column in wrong.T]


thresholds, formulas = {}, {}
for shape, found in ((config, errors), (wide, wide_errors)):
    window, last = shape.sliding_window, shape.num_hidden_layers * (shape.sliding_window - 1)
    names = ["MTP" if layer == L else f"layer {layer}" for layer in shape.state_layers] + ["logits"]
    thresholds[window] = dict(zip(names, fewest(found), strict=True))
    formulas[window] = {f"layer {layer}": (layer + 1) * (window - 1) for layer in shape.layers}
    formulas[window] |= ({"MTP": last + window} if "MTP" in names else {}) | {"logits": last}
    print(f"{'':<23}" + "".join(f"{name:>9}" for name in names))
    for what, numbers in (("measured", thresholds[window]), ("the formula", formulas[window])):
        print(f"window {window:>2}, {what:<12}" + "".join(f"{n:>9}" for n in numbers.values()))

# %% [markdown]
# For V4 that is a lot more than a window of 128:

# %%
published = {}
for name, full_config in (("V4-Flash", flash()), ("V4-Pro", pro())):
    main = replace(full_config, num_nextn_predict_layers=0)
    at = 1024 * full_config.alignment
    published[name] = replay_length(main, at), replay_length(full_config, at)
    print(
        f"{name + ':':<9} {full_config.num_hidden_layers} x 127 = {published[name][0]:,} tokens; with the MTP layer {published[name][1]:,}"
    )

# %% [markdown]
# ## 2. One window is approximate
#
# Some engines replay one window and go on. V4.1 does too; its report says that this is approximate. What comes of it
# here?

# %%
one_window, one_short = errors[W - 1], errors[L * (W - 1) - 2]
assert (one_window.count, one_short.count) == (W, L * (W - 1) - 1)
for name, e in (("one window", one_window), ("one token too few", one_short)):
    rows = sum(e.wrong_rows[:L])
    print(
        f"{name + ':':<18} {e.count:>2} tokens, {rows:>2} boundary rows wrong, largest error of a logit {e.logit_error:.1g}"
    )

# %% [markdown]
# Random weights do not say how much that matters in a trained model. But two things they do show. Nothing
# raises an error. And the error depends on *where the hit falls*: the same prompt gives other logits if another part of
# it was found.

# %%
by_hit = {}
for hit in range(32, LENGTH + 1, PAGE):
    [error] = replay_errors(engine, text[: hit + 12], hit, [W])
    by_hit[hit] = error.logit_error
print("a hit at token     ", "".join(f"{hit:>7}" for hit in by_hit))
print("error, 12 tokens on", "".join(f"{error:>7.2g}" for error in by_hit.values()))

# %% [markdown]
# So such state must not be kept: whoever reuses it would take the error on. In this project it is marked, and refused
# wherever exact state is kept:

# %%
seq = engine.open()
engine.prefill(seq, text[:LENGTH])
damaged = engine.adopt(seq.pages, LENGTH, since=LENGTH - W)
engine.replay(damaged, text[LENGTH - W : LENGTH], exact=False)
refused = []
for keep in (engine.snapshot, engine.save_boundary):
    try:
        keep(damaged)
    except ApproximateState as error:
        refused.append(keep.__name__)
        print(f"{keep.__name__}: {error}")
engine.close(damaged)
engine.close(seq)

# %% [markdown]
# ## 3. A conversation under six policies
#
# The policies say where boundary states are kept, and so what a hit must run again:
#
# | policy | keeps boundary states | a hit runs again |
# |---|---|---|
# | full | at the end of every page | nothing |
# | periodic p | every p tokens | from the last state on: fewer than p |
# | end-points | where a prompt or an answer ends | nothing, if the conversation goes on there |
# | zero | never | L (W - 1) tokens, and W with an MTP layer |
# | one window | never | W tokens, **approximate** |
#
# Whatever the policy, never more than *zero* would run again.
#
# We hold the same conversation under each, through a real cache: five turns. Each prompt is everything that was said
# before and something new. The model answers greedily. After each prompt its whole state and its logits are compared
# with a run of the same prompt from nothing.

# %%
POLICIES = {
    "full": Full(),
    "periodic 32": Periodic(32),
    "periodic 64": Periodic(64),
    "end-points": EndPoints(),
    "zero": Zero(),
    "one window": OneWindow(),
}
lengths, ANSWER = (75, 58, 61, 44, 52), 18
said = np.split(text[: sum(lengths)], np.cumsum(lengths)[:-1])
space = Namespace(
    domain=Tenant("anna", secret=None),
    model=engine.fingerprint,
    tokenizer=None,
    chat_template=None,
    layout="rows",
    page_size=PAGE,
    dtype=numerics.dtype,
    tensor_parallel=TensorParallel(size=1, rank=0, split="none"),
    adapter=None,
    media=(),
    salt=None,
)

conversations = {}
for name, policy in POLICIES.items():
    cache = PrefixCache(new_engine(model, config), policy)
    conversations[name] = converse(cache, space, said, ANSWER, engine)

figure = figures.conversation_figure(
    {name: [measured.turn for measured in found] for name, found in conversations.items()}
)

# %% [markdown]
# A dot is a boundary state. *End-points* starts each turn exactly where the last answer ended, within a page: the
# cache keeps the unfinished page too. The others can use whole pages only, so they compute the last, unfinished page again.
#
# *One window* reuses the first turn only. What it made after its first hit is approximate and was not kept, so
# there is more to compute every turn. An engine that keeps it all the same is faster, and hands the error on.

# %%
reference = [measured.reply for measured in conversations["full"]]
print(
    f"{'':<12} {'states':>6} {'bytes of states':>16} {'run again':>10} {'computed':>9}   {'bits of a cold run':<18} answers"
)
for name, found in conversations.items():
    kept = found[-1].turn.kept
    again, computed = (sum(getattr(m.turn, part) for m in found) for part in ("replayed", "computed"))
    exact = f"{sum(m.equal for m in found)} of {len(found)} turns"
    same = "the same" if [m.reply for m in found] == reference else "OTHER WORDS"
    nbytes = sum(boundary_bytes(config, numerics, position) for position in kept)
    print(f"{name:<12} {len(kept):>6} {nbytes:>16,} {again:>10} {computed:>9}   {exact:<18} {same}")

# %% [markdown]
# All but one give the same bits, and so the same answers; they differ in cost only. The last column is a weak check:
# even *one window* says the same words here, with other bits behind them. Whoever compares answers would not see it.
#
# ## 4. In V4-Flash
#
# What a policy will keep and run again can be said without running anything: it depends on positions only. `foresee`
# asks the same policy objects. First, does it foresee what we have just measured?

# %%
foreseen = {
    name: foresee(config, policy, PAGE, [(len(words), ANSWER) for words in said])
    for name, policy in POLICIES.items()
}
right = {name: foreseen[name] == [m.turn for m in found] for name, found in conversations.items()}
print("foreseen as measured:", ", ".join(f"{name} {ok}" for name, ok in right.items()))

# %% [markdown]
# Then we may ask it about V4-Flash: a conversation of 12 turns, of 2,500 tokens each and answers of 500 tokens, in pages
# of 256 tokens. Bytes are those of the published formats (`03_how_many_bytes`).

# %%
v4 = read_model("flash")
flash_main = replace(flash(), num_nextn_predict_layers=0)
turns = [(2500, 500)] * 12
total = sum(words + answer for words, answer in turns)
at_boundary = snapshot_bytes(v4.v4, v4.format, 128 * 20)
FLASH_POLICIES = {
    "full": Full(),
    "periodic 1,024": Periodic(1024),
    "periodic 4,096": Periodic(4096),
    "end-points": EndPoints(),
    "zero": Zero(),
    "one window": OneWindow(),
}

costs = {}
print(
    f"{total:,} tokens: {size(v4.growing_bytes(total))} of pages; a boundary state at a multiple of 128: {size(at_boundary)}\n"
)
print(
    f"{'policy':<16} {'states':>6} {'bytes of states':>16} {'of pages':>9} {'run again a turn':>17} {'at most':>8}   exact?"
)
for name, policy in FLASH_POLICIES.items():
    found = foresee(flash_main, policy, 256, turns)
    states = sum(snapshot_bytes(v4.v4, v4.format, position) for position in found[-1].kept)
    rerun = [turn.replayed for turn in found[1:]]  # the first turn has nothing to reload
    exact = all(turn.exact for turn in found)
    costs[name] = figures.Cost(v4.growing_bytes(total), states, rerun, exact)
    share = states / v4.growing_bytes(total)
    print(
        f"{name:<16} {len(found[-1].kept):>6} {size(states):>16} {share:>9.0%} {np.mean(rerun):>17,.0f} {max(rerun):>8,}   {'yes' if exact else 'NO'}"
    )

# %%
figure = figures.policy_cost_figure(costs)

# %% [markdown]
# (In the second turn *zero* has nothing to replay: 2,816 tokens were found, fewer than it needs, so all are computed.
# And all but *end-points* compute the last, unfinished page again.)
#
# - **Full** keeps four times as many bytes of states as of pages. A boundary state is as large as the entries of about
#   1,000 tokens, and here there is one for every 256.
# - **End-points** runs nothing again. Production V4 did this. It serves the next turn of the same conversation; a request
#   that parts from it anywhere else finds no state there and falls back to a replay. States in the middle of a block
#   are larger: its raw rows come along.
# - **Zero** keeps nothing and runs up to 5,461 tokens again, twice as much as the 2,500 new ones of a turn. Worth it
#   only where compute is cheap and bytes are not.
# - **Periodic** lies between. Its state is found by *any* request with the same prefix.
# - **One window** is cheap, and not the same model any more.
#
# ## What was shown

# %%
# The state of each layer is exact from (its number + 1) (W - 1) replayed tokens on, and not one token earlier.
assert thresholds == formulas
assert enough == L * (W - 1) + W and not errors[enough - 2].exact
assert all(error.exact for error in errors[enough - 1 :])

# Within a replay: layer l is exact from its l (W - 1)-th token on; one window makes only layer 0 exact.
for layer in range(L):
    assert long[layer].tolist() == [at >= layer * (W - 1) for at in range(enough)]
assert long[:, -(W - 1) :].all() and short[0].all() and not short[1, : W - 1].any() and not short[2:L].any()

# The published models.
assert published == {"V4-Flash": (5461, 5589), "V4-Pro": (7747, 7875)}
assert at_boundary == 3_644_416

# One window is wrong and says nothing; what it made is refused.
assert one_window.logit_error > 10 * one_short.logit_error > 0 and not one_short.exact
assert min(by_hit.values()) > 0 and len(set(by_hit.values())) == len(by_hit)
assert refused == ["snapshot", "save_boundary"]

# Every policy but one gives the bits of a cold run, in every turn; every token was counted once.
for name, found in conversations.items():
    equal = [m.equal for m in found]
    assert equal == [True] * 5 if name != "one window" else equal == [True] + [False] * 4
    assert all(m.turn.exact == m.equal for m in found)
    assert all(m.turn.reused + m.turn.replayed + m.turn.computed == m.turn.prompt for m in found)
    assert name == "one window" or [m.reply for m in found] == reference
again = {name: [m.turn.replayed for m in found[1:]] for name, found in conversations.items()}
assert again["full"] == again["end-points"] == [0] * 4 and again["zero"] == [enough] * 4
assert max(again["periodic 32"]) < 32 and max(again["periodic 64"]) <= enough

# What was foreseen is what was measured; and so for V4-Flash:
assert all(right.values())
assert max(costs["zero"].rerun) == 5461 and max(costs["periodic 4,096"].rerun) < 4096
assert costs["full"].boundaries > 3 * costs["full"].pages > 10 * costs["periodic 4,096"].boundaries
assert costs["zero"].rerun[0] == 0 and not costs["zero"].boundaries and not any(costs["end-points"].rerun)
assert [name for name, cost in costs.items() if not cost.exact] == ["one window"]
print("all hold")
