# %% [markdown]
# # The reload gate
#
# A language model that has read a long prompt holds *state*: what its layers remember of the prompt. Engines
# keep this state to save work. They reuse it for the next request with the same prompt, move it to host memory
# or to disk, or send it to another machine. Each time they must bring back **all** of it.
#
# With one KV cache a layer that is simple. With CSA and HCA it is not: a layer has a window, compressed entries,
# index keys, and the raw rows of blocks that are not finished. Real engines lost some of them. The answers that
# followed looked like text, and were wrong.
#
# This notebook shows what must survive, runs the gate that checks it, and then takes away one piece after the
# other to see what breaks. If CSA, HCA and the window are new to you, read `01_attention_from_scratch` first.

# %%
import codecs
import this

import numpy as np

from goldenkv import figures
from goldenkv.gate import Gate, ModelSource
from goldenkv.knockout import each_cell, each_component, knock_out
from goldenkv.state import cells, compare
from goldenkv.text import byte_tokens

# %%
STEPS = 16
source = ModelSource(seed=0)  # six layers with random weights
config, model = loaded = source.load()
text = byte_tokens(codecs.decode(this.s, "rot13"), config.vocab_size)

LENGTH, ALIGNED = 762, 640  # in the middle of all blocks; at the end of all blocks
prompt = text[:LENGTH]
print("layers:", ", ".join(f"{layer} {config.kind(layer).name}" for layer in config.layers))
print(f"prompt: {LENGTH} tokens = {LENGTH // 128} x 128 + {LENGTH % 128};  {LENGTH} mod 4 = {LENGTH % 4}")

# %% [markdown]
# ## 1. What must survive
#
# The **component table** declares everything that a sequence remembers: which layers have it and which rows are
# *live* at a given length. Live means: the next token can depend on it. Fewer rows are wrong, more are waste.
#
# The picture shows one layer of each kind. The left half shows the whole prompt, the right half its last
# tokens. Vertical lines are the ends of blocks, of 128 tokens on the left and of 4 on the right. The numbers
# are the live rows (one entry stands for 4 or for 128 tokens).

# %%
figure = figures.live_rows_figure(config, LENGTH)

# %% [markdown]
# Orange components lie in pages. They only grow: an entry never changes once it is made. Blue components belong
# to the *boundary*, the place where the prompt ends. They change with every token:
#
# - **window**: the last W - 1 rows. The next token makes row W itself.
# - **rows**: the raw rows (content and score) of the unfinished block. They will become an entry.
# - **overlap** (CSA only): the raw rows of the last *finished* block. Its own entry is made, but the **next**
#   entry pools it once more, through the other half of the channels. `index_...` is the same for the indexer.
#
# How many rows are live depends on the length:

# %%
figure = figures.live_counts_figure(config, range(384, 641))

# %% [markdown]
# At which lengths is a component empty? (From 128 tokens on; before that the window is still filling.)


# %%
def empty_at(cell):
    """The lengths, modulo 128, at which no row is live."""
    empty = {length % 128 for length in range(512, 640) if not len(cell.live(config, length))}
    for divisor in (128, 4):
        if empty == set(range(0, 128, divisor)):
            return f"at multiples of {divisor}"
    return "never" if not empty else sorted(empty)


emptiness = {}
for cell in cells(config):
    emptiness.setdefault((cell.component.name, config.kind(cell.layer).name), empty_at(cell))
for (component, kind), when in emptiness.items():
    print(f"{kind:<7} {component:<20} empty {when}")

# %% [markdown]
# So at a multiple of 128 tokens all unfinished blocks are empty. It is tempting to think that the boundary then
# holds nothing but the window. But the overlap is **never** empty.
#
# ## 2. The gate
#
# The gate computes the prompt once (*cold*), takes a snapshot of the live rows, and decodes. Then every **path**
# comes to the same state in another way and decodes the same tokens. Every row of every component and every
# logit must have the *same bits*. No tolerance: a tolerance would hide small damage.
#
# Then come the **controls**: the state is damaged on purpose, and the gate must notice. A check that cannot fail
# shows nothing. (One control is left out here, as it compiles many programs: chunks of free shape. The command
# `goldenkv reload` runs them all.)

# %%
gate = Gate(source, prompt, steps=STEPS, loaded=loaded)
results = [gate.run_line(name) for name in gate.names if name != "free-shape chunks"]

print(f"{'path':<31} {'reused':>7} {'equal rows':>16}")
for r in results:
    if not r.control:
        rows = f"{r.difference.equal:,} of {r.difference.rows:,}"
        print(f"{r.name:<31} {r.reused or '':>7} {rows:>16}  {'equal' if r.ok else 'DIFFERS'}")
print(f"\n{'control':<31} caught by")
for r in results:
    if r.control:
        print(f"{r.name:<31} {r.caught or 'NOT CAUGHT'}")

# %% [markdown]
# The picture shows where rows differ. Each line is a path or a control, each column a group of rows of one
# component, over all layers. Green is equal, red is different.

# %%
figure = figures.gate_figure(results)

# %% [markdown]
# "One bit flipped" is not in the picture: the checksum in the snapshot's file caught it before anything ran.
#
# ## 3. What each missing piece corrupts
#
# Now we take away one component of one layer: we set its rows to zero, as in memory that nobody has written.
# We restore the rest and run the next 16 tokens, the same tokens as in the undamaged run. We record three
# things at every step:
#
# - Did a layer make other rows for this token? Then its *input* was already wrong.
# - Did a layer make another entry or index key?
# - Do the logits differ, and by how much?
#
# We do it at two lengths: in the middle of all blocks, and at a multiple of 128. (The 16 tokens run in one call.
# The first check below says that this gives the bits of 16 single steps.)

# %%
everything = each_cell(config)
middle = knock_out(gate.engine, gate.snapshot, gate.decoded, everything | {"nothing": []})

sequence = gate.engine.open()
gate.engine.prefill(sequence, text[:ALIGNED])
aligned_snapshot = gate.engine.snapshot(sequence)
gate.engine.close(sequence)
following = text[ALIGNED : ALIGNED + STEPS]
aligned = knock_out(gate.engine, aligned_snapshot, following, everything | {"nothing": []})

sequence = gate.engine.restore(gate.snapshot)
at_once = gate.engine.prefill(sequence, gate.decoded, all_logits=True)
gate.engine.close(sequence)
one_call = compare({"logits": gate.expected["logits"]}, {"logits": at_once}).same
print(f"16 tokens in one call give the bits of 16 decode steps: {one_call}")
print(f"nothing lost, nothing different: {middle.pop('nothing').same and aligned.pop('nothing').same}")

# %%
figure = figures.damage_figure(config, middle, f"{LENGTH} tokens: in the middle of all blocks")

# %%
figure = figures.damage_figure(config, aligned, f"{ALIGNED} tokens: at the end of all blocks")

# %% [markdown]
# How to read them: take the line of a lost cell and go right. Up to and including its own layer, the rows of new
# tokens are equal. Damage only travels to later layers, and from there to the logits.

# %%
figure = figures.error_figure({f"{LENGTH} tokens": middle, f"{ALIGNED} tokens": aligned})


# %%
def first(flags):
    return f"step {np.argmax(flags) + 1}" if flags.any() else "-"


def table(damages, title):
    print(
        f"{title}\n{'lost in all layers':<21} {'rows':>5}  {'entry wrong':<12} {'logits wrong':<13} largest error"
    )
    for name, d in damages.items():
        error = f"{d.error.max():.2f}" if d.lost else ""
        print(f"{name:<21} {d.lost:>5}  {first(d.entries.any(0)):<12} {first(d.logits):<13} {error:>13}")


together_middle = knock_out(gate.engine, gate.snapshot, gate.decoded, each_component(config))
together_aligned = knock_out(gate.engine, aligned_snapshot, following, each_component(config))
table(together_middle, f"{LENGTH} tokens")
print()
table(together_aligned, f"{ALIGNED} tokens")
