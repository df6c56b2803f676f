# %% [markdown]
# # Attention from scratch, up to CSA and HCA
#
# You know what a transformer is: layers that mix tokens by attention and change each token by a feed-forward
# block. This notebook starts at "what is a KV cache" and ends at the two compressed kinds of attention of
# DeepSeek-V4: **CSA** (compressed sparse attention) and **HCA** (heavily compressed attention).
#
# Every number and every picture comes from functions of `goldenkv.ops`, or from a run of the whole model. The
# weights are random. So the *mechanism* is the real one, but what a head looks at has no meaning.
#
# The prompt is a text that comes with every Python and never changes: `import this` prints it. A byte is a token.

# %%
import codecs
import this
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from goldenkv import figures
from goldenkv.config import Numerics, bench, flash, pro
from goldenkv.engine import Engine
from goldenkv.model.attention import layer_frequencies
from goldenkv.model.weights import Model
from goldenkv.ops import attend, compress, index, mhc
from goldenkv.ops.linear import project
from goldenkv.ops.norm import rms_norm
from goldenkv.ops.rope import rotate
from goldenkv.state import cells
from goldenkv.text import byte_tokens

# %%
config = replace(bench(), num_hidden_layers=3, compress_ratios=(0, 4, 128), index_topk=16)
model = Model(config, seed=0)

text = codecs.decode(this.s, "rot13")[:640]
tokens = byte_tokens(text, config.vocab_size)
positions = jnp.arange(len(tokens), dtype=jnp.int32)
WINDOW, CSA, HCA = config.layers  # a layer of each kind

print(f"{len(tokens)} tokens; layers: {', '.join(config.kind(layer).name for layer in config.layers)}")
print(
    f"window {config.sliding_window}, CSA ratio {config.compress_ratios[CSA]}, HCA ratio {config.compress_ratios[HCA]}"
)
print(f"{config.num_attention_heads} query heads of {config.head_dim} channels, one KV head")

# %% [markdown]
# ## 1. Query, key, value, and why a cache exists
#
# Attention lets a token look at the tokens before it. Each token makes three vectors:
#
# - a **query** q: what it looks for,
# - a **key** k: what it can be found by,
# - a **value** v: what it gives to those who find it.
#
# The score of token t for an earlier token j is the dot product of q at t and k at j. A softmax turns the
# scores into weights that sum to 1, and the output of t is the weighted sum of the values.
#
# In this model one row is key and value at once: **K = V**. We call it the **KV row** of a token. Here are the
# queries and the KV rows of the first six tokens, made with the first layer's weights.

# %%
few = 6
weights = model.layers[WINDOW].attention
frequency = layer_frequencies(config, WINDOW)
x = rms_norm(model.embed[...][tokens[:few]])


@jax.jit
def make_q(x, positions):
    latent = rms_norm(project(x, weights.q_down[...]), weights.q_norm[...])
    q = project(latent, weights.q_up[...]).reshape(-1, config.num_attention_heads, config.head_dim)
    return rotate(rms_norm(q), positions, frequency)


@jax.jit
def make_kv(x, positions):
    return rotate(rms_norm(project(x, weights.kv[...]), weights.kv_norm[...]), positions, frequency)


print("q: ", make_q(x, positions[:few]).shape, " tokens, heads, channels")
print("kv:", make_kv(x, positions[:few]).shape, "   tokens, channels")

# %% [markdown]
# A model writes one token at a time. To write the next one it needs the output of the *last* token only. That
# output needs one query, the last, but the KV rows of *all* tokens.
#
# A KV row depends on its own token and the tokens before it, never on later ones. So it does not change when
# the text grows. There are two ways to write six tokens:
#
# - **without a cache**: make all KV rows again at every step,
# - **with a cache**: make one new row at every step and keep the old ones.


# %%
@jax.jit
def attend_last(q, rows):
    """The output of the last token, which sees all rows."""
    return attend.window_attention(q, rows, jnp.ones((1, len(rows)), bool), weights.sinks[...])


recomputed, remembered, cache = [], [], []
for t in range(few):
    all_so_far, now = slice(0, t + 1), slice(t, t + 1)
    q = make_q(x[now], positions[now])
    recomputed.append(attend_last(q, make_kv(x[all_so_far], positions[all_so_far])))  # t + 1 rows
    cache.append(make_kv(x[now], positions[now]))  # one row
    remembered.append(attend_last(q, jnp.concatenate(cache)))

cache_error = max(float(jnp.abs(a - b).max()) for a, b in zip(recomputed, remembered, strict=True))
print(f"KV rows made without a cache: {sum(range(1, few + 1))}")
print(f"KV rows made with a cache:    {len(cache)}")
print(f"outputs agree to 1e-5:        {cache_error < 1e-5}")

# %%
figure = figures.cache_figure(list(text[:few]))

# %% [markdown]
# Without a cache the work grows with the square of the length. That is why every engine keeps the rows, and
# why they are worth moving: to other memory, to disk, to another machine.
#
# "Agree to 1e-5" is not "equal". The two ways ran matrix products of other shapes, and shapes change the last
# bits. The engine of this project runs everything in one shape, the tile; there the bits are equal.
# Notebook `02_reload_gate` is about that.
#
# ## 2. One KV head, and K = V
#
# Textbook attention has as many keys and values as it has query heads. Here all query heads share one KV row.
# That makes the cache small:

# %%
textbook = 2 * config.num_attention_heads * config.head_dim
shared = config.head_dim
print(f"numbers a token and layer, a key and a value for each head: {textbook}")
print(f"numbers a token and layer, one shared row with K = V:       {shared}")
print(f"saved by a factor of {textbook // shared}")

# %% [markdown]
# K = V has a price. A key must know its position, so it is rotated (**RoPE**): the last channels turn by an
# angle that grows with the position. The dot product of two rotated vectors depends on their *distance* only.
# But now the values are rotated too. So the output is rotated back, by the angle of the query. After that
# nothing depends on where the text starts. We move it by 1000 positions and look:


# %%
@jax.jit
def output_at(start):
    at = positions[:few] + start
    rows = make_kv(x, at)
    visible = attend.window_visible(at, at, config.sliding_window)
    turned = attend.window_attention(make_q(x, at), rows, visible, weights.sinks[...])
    return turned, rotate(turned, at, frequency, inverse=True)


turned_0, output_0 = output_at(0)
turned_1000, output_1000 = output_at(1000)
shift_before = float(jnp.abs(turned_0 - turned_1000).max())
shift_after = float(jnp.abs(output_0 - output_1000).max())
print("moved by 1000 positions, outputs differ by more than 0.1:")
print(f"  before the inverse rotation: {shift_before > 0.1}")
print(f"  after it:                    {shift_after > 0.1} (below 0.001: {shift_after < 1e-3})")

# %% [markdown]
# ## 3. The sliding window
#
# Every layer has a **window**: query t sees the rows of tokens t - W + 1 to t, itself included. The model has
# W = 128. The picture has W = 8, so that you can see it. Old rows drop out: a window layer keeps W rows, however
# long the text.

# %%
SMALL_W, SMALL_T = 8, 24
at = jnp.arange(SMALL_T, dtype=jnp.int32)
small_window = np.asarray(attend.window_visible(at, at, SMALL_W))
figure = figures.reach_figure(
    [figures.Reach(f"window of {SMALL_W}", small_window, np.zeros_like(small_window))], list(text[:SMALL_T])
)

# %% [markdown]
# ## 4. Compressors: many rows become one entry
#
# A window forgets. To see further back, CSA and HCA layers also keep **compressed entries**: one row that
# stands for a whole block of tokens.
#
# A compressor makes two vectors of each token: `kv` (content) and `score` (how much it counts). The entry is
# the sum over the block of softmax(score) * kv, *channel by channel*: each channel weighs the tokens in its
# own way. Then come a norm and RoPE.
#
# - **HCA**: blocks of 128 tokens, one entry each.
# - **CSA**: blocks of 4 tokens, one entry each. But entry w pools **8** rows: the 4 of its own block, and the
#   4 of the block before. Each token has two halves of channels for that: the first half serves the next
#   block's entry, the second half serves its own.
#
# Which rows does an entry depend on? We do not draw that by hand. We poison one row with NaN and look at which
# entries become NaN; then the next row, and so on.


# %%
def pooled(tokens, compress_rate, overlap):
    """[entries, tokens], twice: pooled through the first half of the channels, and through the rest."""
    d = 4
    channels = 2 * d if overlap else d
    kv, score = jax.random.normal(jax.random.key(0), (2, tokens, channels))
    row, channel = jnp.arange(tokens)[:, None], jnp.arange(channels)

    def hit(token, part):
        poisoned = jnp.where((row == token) & part, jnp.nan, kv)
        made = compress.compress(
            poisoned, score, jnp.ones(d), jnp.ones(1), compress_rate=compress_rate, overlap=overlap
        )
        return jnp.isnan(made).any(axis=-1)

    hits = jax.jit(jax.vmap(hit, in_axes=(0, None), out_axes=1))
    return [
        np.asarray(hits(jnp.arange(tokens), part))
        for part in (channel < channels - d, channel >= channels - d)
    ]


csa_earlier, csa_own = pooled(SMALL_T, 4, overlap=True)
hca_earlier, hca_own = pooled(len(tokens), 128, overlap=False)
print("rows pooled by CSA entries 0 to 5:", (csa_earlier.sum(1) + csa_own.sum(1)).tolist())
print("rows pooled by HCA entries 0 to 4:", hca_own.sum(1).tolist())

# %%
figure = figures.pooled_figure(
    [
        figures.Pooled(
            "CSA: blocks of 4, each entry pools 8 rows", csa_earlier, csa_own, np.arange(0, SMALL_T, 4)
        ),
        figures.Pooled("HCA: blocks of 128", hca_earlier, hca_own, np.arange(0, len(tokens), 128)),
    ]
)

# %% [markdown]
# Entry 0 of CSA has no block before it and pools only 4 rows. The dot is the position whose RoPE the entry
# gets: the *first token of its own block*, w * m for entry w with ratio m.
#
# ### Pooling weights of a real run
#
# Now we run the model over the prompt. `prefill_probed` returns what each layer computed on the way. With it,
# and the functions of `goldenkv.ops`, we can follow a layer line by line.

# %%
engine = Engine(model, config, max_length=1024)
sequence = engine.open()
logits, probe = engine.prefill_probed(sequence, tokens)
rows = engine.rows(sequence)  # what the engine remembers after the prompt
print("logits:", logits.shape)
print("\nwhat the CSA layer remembers:")
for name, value in rows.items():
    if name.startswith(f"layers.{CSA}."):
        print(f"  {name:<29} {len(value):>3} rows of {value.shape[1]}")


# %%
@jax.jit
def follow(block, streams, frequency):
    """From the residual streams to the layer's input x, its queries and its KV rows. Read from top to bottom."""
    mixing, a = block.attention_mixing, block.attention
    pre, _, _ = mhc.stream_mixing(
        streams,
        mixing.weight[...],
        mixing.base[...],
        mixing.scale[...],
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )
    x = rms_norm(mhc.collapse(streams, pre), block.attention_norm[...])
    latent = rms_norm(project(x, a.q_down[...]), a.q_norm[...])
    q = project(latent, a.q_up[...]).reshape(-1, config.num_attention_heads, config.head_dim)
    q = rotate(rms_norm(q), positions, frequency)
    kv = rotate(rms_norm(project(x, a.kv[...]), a.kv_norm[...]), positions, frequency)
    c = a.compressor
    return x, q, kv, compress.compressor_rows(x, c.kv[...], c.gate[...], c.position_bias[...], positions)


csa_x, csa_q, csa_kv, csa_rows = follow(
    model.layers[CSA], probe.streams[CSA - 1], layer_frequencies(config, CSA)
)
hca_x, hca_q, hca_kv, hca_rows = follow(
    model.layers[HCA], probe.streams[HCA - 1], layer_frequencies(config, HCA)
)

csa_blocks = compress.overlap_blocks(*(r.reshape(-1, 4, r.shape[-1]) for r in csa_rows))  # from entry 1 on
hca_blocks = tuple(r.reshape(-1, 128, r.shape[-1]) for r in hca_rows)
csa_weight, hca_weight = (jax.nn.softmax(score, axis=1) for _, score in (csa_blocks, hca_blocks))

# %% [markdown]
# `csa_weight[w - 1]` holds the weights of the 8 rows of entry w, for each channel. Each column sums to 1. The
# upper four rows are the block before, the lower four the own block.

# %%
entry_a, entry_b = 40, 41
figure = figures.pooling_weights_figure(
    [
        (
            f"CSA entry {entry_a}: blocks {entry_a - 1} and {entry_a}",
            np.asarray(csa_weight[entry_a - 1]),
            np.arange(4 * entry_a - 4, 4 * entry_a + 4),
        ),
        (
            f"CSA entry {entry_b}: blocks {entry_b - 1} and {entry_b}",
            np.asarray(csa_weight[entry_b - 1]),
            np.arange(4 * entry_b - 4, 4 * entry_b + 4),
        ),
        ("HCA entry 2: block 2", np.asarray(hca_weight[2]), np.arange(256, 384)),
    ]
)

# %% [markdown]
# Entries 40 and 41 share four tokens: those of block 40. But they pool them through different halves of their
# channels, with different weights.
#
# Is this what the engine did? `compress.compress` pools the rows and finishes the entries (norm, RoPE at w * m):


# %%
make_entries = jax.jit(compress.compress, static_argnames=("compress_rate", "overlap"))


def entries_of(layer, kv_and_score, overlap):
    norm = model.layers[layer].attention.compressor.norm[...]
    frequency, ratio = layer_frequencies(config, layer), config.compress_ratios[layer]
    return make_entries(*kv_and_score, norm, frequency, compress_rate=ratio, overlap=overlap)


def distance(a, b):
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


csa_entries, hca_entries = rows[f"layers.{CSA}.entries"], rows[f"layers.{HCA}.entries"]
follow_errors = {
    "CSA entries": distance(entries_of(CSA, csa_rows, overlap=True), csa_entries),
    "HCA entries": distance(entries_of(HCA, hca_rows, overlap=False), hca_entries),
    "CSA window rows": distance(csa_kv[-127:], rows[f"layers.{CSA}.window"]),
    "HCA window rows": distance(hca_kv[-127:], rows[f"layers.{HCA}.window"]),
}
for name, error in follow_errors.items():
    print(f"{name + ':':<17} agree with the engine to 1e-3: {error < 1e-3}")

# %% [markdown]
# ## 5. Which entries may a query see?
#
# An entry contains its whole block. A query inside the block must not see it: it would see the future. The rule
# is: query t sees entry w if and only if **w < (t + 1) // m**. So the *last* token of a block sees the entry
# of its own block; the others wait.
#
# Until then the window covers the tokens of the unfinished block. And it covers much more: entries are not left
# out where the window reaches too. The coverage overlaps. In the picture W is 8, and 8 stands for HCA's 128. A
# token counts as reached if its block is visible.


# %%
def by_entries(tokens, ratio):
    """[queries, tokens]: the token's block has an entry that the query sees."""
    count = np.asarray(compress.visible_entries(jnp.arange(tokens), ratio))
    return np.arange(tokens)[None] // ratio < count[:, None]


figure = figures.reach_figure(
    [
        figures.Reach("CSA: window 8, ratio 4, all visible entries", small_window, by_entries(SMALL_T, 4), 4),
        figures.Reach("HCA: window 8, ratio 8", small_window, by_entries(SMALL_T, 8), 8),
    ],
    list(text[:SMALL_T]),
)

# %% [markdown]
# Read a line from left to right: first the tokens that only entries reach (orange), then those that both reach
# (green), then those that only the window reaches (blue). The steps of the staircase are the block ends. No
# past token is left out, because the window is at least as long as a block.
#
# ## 6. The indexer: CSA looks at few entries
#
# A long text has many CSA entries: one for every 4 tokens. A query attends to the **top-k** only. A small
# attention of its own chooses them, the **lightning indexer**: it has its own queries, its own compressed keys
# and a weight for each of its heads. Score of entry w = sum over heads of weight * ReLU(query . key).
#
# The probe holds the indexer's queries and weights and
# what was selected; the keys are part of the engine's state.

# %%
count = np.asarray(compress.visible_entries(positions, 4))
ids = np.arange(len(csa_entries))
visible = ids[None] < count[:, None]
scores = index.index_scores(
    jnp.asarray(probe.index_q[CSA]),
    jnp.asarray(rows[f"layers.{CSA}.index_keys"]),
    jnp.asarray(probe.index_weight[CSA]),
)
ours = np.asarray(index.top_k_entries(scores, jnp.asarray(visible), config.index_topk))


def as_mask(selected):
    return (selected[:, :, None] == ids).any(axis=1)


chosen = as_mask(probe.selected[CSA])
agreement = (as_mask(ours) == chosen).mean()
print(f"k is {config.index_topk} here, {flash().index_topk} and {pro().index_topk} in the published models")
print(f"entries visible to the last query:  {count[-1]}")
print(f"entries selected by the last query: {chosen[-1].sum()}")
print(f"selections that agree with the engine's: {agreement:.1%}")

# %%
figure = figures.index_figure(np.asarray(scores), chosen, visible, query=500)

# %% [markdown]
# The vertical stripes are entries that many queries like. Early queries have fewer than k entries and take all
# of them: the black triangle at the top.
#
# Three rules must be fixed, or two implementations will choose differently:
#
# - **Ties** go to the lowest entry. ReLU makes exact zeros, so ties do happen.
# - **Too few** visible entries: the rest of the list is -1, which means "no entry" and is never read.
# - **NaN** is never chosen.

# %%
every = jnp.ones((1, 4), bool)
examples = {
    "tie of entries 0, 1, 2": (jnp.array([[0.0, 0.0, 0.0, 1.0]]), every),
    "only entries 0 and 1 visible": (
        jnp.array([[1.0, 2.0, 9.0, 9.0]]),
        jnp.array([[True, True, False, False]]),
    ),
    "entry 1 is NaN": (jnp.array([[1.0, jnp.nan, 3.0, 2.0]]), every),
}
picks = {name: index.top_k_entries(s, v, 3)[0].tolist() for name, (s, v) in examples.items()}
for name, picked in picks.items():
    print(f"{name:<30} top 3: {picked}")

# %% [markdown]
# ## 7. What a query reaches in the whole prompt
#
# Now the real sizes: W = 128, ratios 4 and 128, 640 tokens. For CSA we take the entries that the indexer
# selected in the run, and the 8 tokens that each of them pools.

# %%
window = np.asarray(attend.window_visible(positions, positions, config.sliding_window))
first_half, own_half = pooled(len(tokens), 4, overlap=True)
csa_reach = chosen @ (first_half | own_half)
hca_reach = by_entries(len(tokens), 128)
nothing = np.zeros_like(window)

for name, reach in {"window": nothing, "CSA": csa_reach, "HCA": hca_reach}.items():
    reached = (window | reach)[-1]
    print(f"{name:<6} layer: the last query reaches {reached.sum():>3} of {len(tokens)} tokens")

# %%
figure = figures.reach_figure(
    [
        figures.Reach("window-only layer", window, nothing),
        figures.Reach("CSA layer", window, csa_reach),
        figures.Reach("HCA layer", window, hca_reach),
    ]
)

# %% [markdown]
# The window layer sees the near past. CSA adds a choice of the far past in fine grain. HCA adds all of the far
# past in coarse grain: up to 128 tokens squeezed into one row. The model alternates CSA and HCA layers.
#
# ## 8. One softmax, and a sink
#
# Window rows and entries stand side by side under **one** softmax. Each head also has a **sink**: a learned
# logit that takes weight and gives nothing. A head that finds nothing of interest can leave its weight there.
#
# `attend` builds the softmax in steps: first the window, then the entries. After each step it knows the sum of
# all weights so far. From these sums we read how the weight is divided.


# %%
def shares(q, kv, entries_step, sinks):
    """[queries, heads, 3]: the weight of the window, of the entries and of the sink."""
    state = attend.absorb(attend.start(*q.shape), q, kv, jnp.asarray(window))
    sums = [state.peak + jnp.log(state.total)]
    state = entries_step(state)
    sums.append(state.peak + jnp.log(state.total))
    everything = jnp.logaddexp(sums[1], sinks)
    near, both, sink = (
        jnp.exp(sums[0] - everything),
        jnp.exp(sums[1] - everything),
        jnp.exp(sinks - everything),
    )
    return np.asarray(jnp.stack([near, both - near, sink], axis=-1))


selected = jnp.asarray(probe.selected[CSA])
csa_keys = jnp.asarray(csa_entries)[jnp.maximum(selected, 0)]
hca_visible = jnp.asarray(np.arange(len(hca_entries))[None] < (np.arange(len(tokens))[:, None] + 1) // 128)
sinks = [model.layers[layer].attention.sinks[...] for layer in config.layers]

divided = {
    "CSA layer": shares(
        csa_q, csa_kv, lambda s: attend.absorb_selected(s, csa_q, csa_keys, selected >= 0), sinks[CSA]
    ),
    "HCA layer": shares(
        hca_q, hca_kv, lambda s: attend.absorb(s, hca_q, jnp.asarray(hca_entries), hca_visible), sinks[HCA]
    ),
}
for name, share in divided.items():
    parts = share[-1].mean(axis=0)
    print(
        f"{name}, last query, mean over heads: window {parts[0]:.0%}, entries {parts[1]:.0%}, sink {parts[2]:.1%}"
    )
for name, seen in {"CSA": config.index_topk, "HCA": len(hca_entries)}.items():
    print(
        f"{name} layer, last query: entries are {seen / (seen + config.sliding_window):.0%} of the rows it sees"
    )
print(f"CSA layer, first query, mean over heads: sink {divided['CSA layer'][0, :, 2].mean():.0%}")

# %%
figure = figures.shares_figure(divided)

# %% [markdown]
# The first query has only itself to look at, so the sink takes much. With more rows its share shrinks. In this
# random model the rest divides roughly by the number of rows; a trained model learns what to do with it.
#
# ## 9. How many bytes a token
#
# What must be kept is declared once, in the **component table** (`goldenkv.state.components`). The engine, the
# snapshots and this cell all read it. Rows in *pages* grow with the text. Rows at the *boundary* do not.
#
# Here is the published Flash model without its MTP layer, which only drafts: all rows in BF16 except for the
# compressor rows, which are float32.

# %%
published = replace(flash(), num_nextn_predict_layers=0)
numerics = Numerics(dtype="bfloat16")


def row_bytes(cell):
    size = 4 if cell.component.dtype(numerics) == "float32" else 2
    return size * cell.component.channels(published, cell.layer)


def growing(layer):
    mine = [c for c in cells(published) if c.layer == layer and c.component.paged]
    return sum(row_bytes(c) / published.compress_ratios[layer] for c in mine)


def fixed(layer):
    mine = [c for c in cells(published) if c.layer == layer and not c.component.paged]
    return sum(row_bytes(c) * c.component.most_rows(published, layer) for c in mine)


kinds = {}
for layer in published.layers:
    kinds.setdefault(published.kind(layer).name, []).append(layer)
print("kind    layers  bytes a token and layer  fixed bytes a layer")
for kind, layers in kinds.items():
    print(f"{kind:<7} {len(layers):>6}  {growing(layers[0]):>23,.0f}  {fixed(layers[0]):>19,}")
per_token = sum(growing(layer) for layer in published.layers)
uncompressed = published.num_hidden_layers * published.head_dim * 2
print(f"\nall layers: {per_token:,.0f} bytes a token; a KV row a token in every layer: {uncompressed:,}")

# %%
lengths = 2 ** np.arange(7, 21)
exact = [sum(len(c.live(published, int(n))) * row_bytes(c) for c in cells(published)) for n in lengths]
textbook_bytes = 2 * published.num_attention_heads * uncompressed
figure = figures.state_bytes_figure(
    lengths.tolist(),
    {
        "a key and a value for each head": (lengths * textbook_bytes).tolist(),
        "one KV row a token, K = V": (lengths * uncompressed).tolist(),
        "window, CSA and HCA (Flash)": exact,
    },
)
print(
    f"at {lengths[-1]:,} tokens: {exact[-1] / 2**30:.1f} GiB instead of {lengths[-1] * uncompressed / 2**30:.0f} GiB"
)

# %% [markdown]
# The lowest curve starts flat: for a short text the fixed part is nearly all.
#
# ## 10. Use it as your golden reference
#
# `goldenkv.ops` are pure functions: arrays in, arrays out. Nothing needs a model or an engine. If you write
# your own kernel, give both the same arrays and compare. Here "your kernel" is five lines of NumPy in float64.

# %%
rng = np.random.default_rng(0)
t, h, d, n, k = 5, 8, 64, 12, 4
q = rng.standard_normal((t, h, d), np.float32)
near = rng.standard_normal((t, d), np.float32)
far = rng.standard_normal((n, d), np.float32)
your_sinks = rng.standard_normal(h, np.float32)
picked = np.array([[3, 0, 7, -1], [1, 2, -1, -1], [-1, -1, -1, -1], [11, 5, 4, 9], [0, 1, 2, 3]], np.int32)
at = jnp.arange(t, dtype=jnp.int32)

golden = jax.jit(attend.csa_attention)(
    jnp.asarray(q),
    jnp.asarray(near),
    attend.window_visible(at, at, 3),
    jnp.asarray(far),
    jnp.asarray(picked),
    jnp.asarray(your_sinks),
)


def your_kernel(t):
    keys = np.concatenate([near[max(0, t - 2) : t + 1], far[picked[t][picked[t] >= 0]]]).astype(np.float64)
    weight = np.exp(q[t] @ keys.T / np.sqrt(d))
    return weight @ keys / (weight.sum(axis=1) + np.exp(your_sinks))[:, None]


kernel_error = distance(golden, np.stack([your_kernel(i) for i in range(t)]))
print(f"agrees to 1e-5: {kernel_error < 1e-5}")

# %% [markdown]
# Shapes and dtypes are checked at every call. A wrong one is an error, not a wrong result:

# %%
from jaxtyping import TypeCheckError

try:  # a sink too many
    attend.window_attention(jnp.asarray(q), jnp.asarray(near), jnp.ones((t, t), bool), jnp.zeros(h + 1))
    refused = False
except TypeCheckError:
    refused = True
print("refused:", refused)

# %% [markdown]
# ## What was shown

# %%
# A cache changes the work, not the result; the inverse rotation makes outputs independent of the start.
assert cache_error < 1e-5 and len(cache) == few
assert shift_before > 0.1 and shift_after < 1e-3
# An entry pools 8 rows (CSA, the first one 4) or 128 (HCA).
assert (csa_earlier.sum(1) + csa_own.sum(1)).tolist() == [4, 8, 8, 8, 8, 8]
assert hca_own.sum(1).tolist() == [128] * 5
# Pooling weights sum to 1; what we followed by hand is what the engine computed.
assert np.allclose(csa_weight.sum(axis=1), 1, atol=1e-5) and np.allclose(hca_weight.sum(axis=1), 1, atol=1e-5)
assert all(error < 1e-3 for error in follow_errors.values())
# No query sees the future, and every past token is within reach of the window or of a visible entry.
for size, ratio in ((SMALL_T, 4), (SMALL_T, 8)):
    seen = small_window | by_entries(size, ratio)
    assert np.array_equal(seen, np.tri(size, dtype=bool))
assert not (csa_reach & ~np.tri(len(tokens), dtype=bool)).any()
# The indexer: min(k, visible) entries, the rules of ties, -1 and NaN.
assert np.array_equal(chosen.sum(1), np.minimum(count, config.index_topk)) and agreement > 0.99
assert list(picks.values()) == [[3, 0, 1], [1, 0, -1], [2, 3, 0]]
# Shares sum to 1, and the sink's share falls.
for share in divided.values():
    assert np.allclose(share.sum(-1), 1, atol=1e-4) and share[0, :, 2].mean() > share[-1, :, 2].mean()
# Bytes of the published model, and the golden reference against another implementation.
assert per_token == 6880
assert kernel_error < 1e-5 and refused
print("all hold")
