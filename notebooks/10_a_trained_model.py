# %% [markdown]
# # A small model, trained
#
# Random weights are enough to ask whether state survives. They are not enough to ask what is *in* the state: whether
# neighbouring rows are alike (`11_delta_encoding`), or which entries are selected (`13_selection_patterns`). For that
# the package carries a small model that was trained on real text. This notebook says how, and what it can do.
#
# It was trained on two CPU cores in about an hour. It is no useful language model. It has read ten megabytes.

# %%
import numpy as np

from goldenkv import figures, trained
from goldenkv.config import Numerics
from goldenkv.engine import Engine, generate
from goldenkv.engine.sampling import sample
from goldenkv.state import compare
from goldenkv.train import held_out_losses
from goldenkv.train.shapes import count
from goldenkv.train.study import POSITIONS, by_position

config, model = trained.load()
about = trained.training()

# %% [markdown]
# ## 1. Shape and text

# %%
print(f"{count(config):,} parameters, {(trained.FOLDER / 'model.safetensors').stat().st_size / 1e6:.1f} MB")
for layer in config.layers:
    print(f"  layer {layer}: {config.kind(layer).value}")
print(f"window {config.sliding_window}, {config.num_attention_heads} heads of {config.head_dim} channels,")
print(
    f"top-{config.index_topk} of the indexer, {config.n_routed_experts} experts of which {config.num_experts_per_tok} run"
)
corpus = about["corpus"]
print(
    f"\n{corpus['files'][0]} files of Python's standard library to train on, {corpus['files'][1]} held out:"
)
print(
    f"{corpus['bytes'][0]:,} and {corpus['bytes'][1]:,} bytes, {corpus['tokens'][0]:,} and {corpus['tokens'][1]:,} tokens"
)

# %% [markdown]
# Window and ratios are those of V4: 128 tokens, blocks of 4 and of 128. Everything else is small. A file is held out
# or not by a hash of its name, so no file is on both sides.
#
# ## 2. The curve
#
# Muon trains the matrices of attention and experts, Adam the rest. In the first half of the steps CSA layers attend
# to all entries while the indexers only watch and learn; then they choose. The last part runs on longer sequences.
#
# The dotted lines are Kneser-Ney n-grams on the same tokens: what counting alone achieves.

# %%
orders = {f"{n}-gram": loss for n, loss in about["ngrams"].items() if int(n) > 1}
figure = figures.curve_figure({"CSA + HCA": about["curve"]}, orders)

# %%
ours = about["measured"]
print(f"held-out loss {ours['loss']:.3f} nats a token, {ours['bits_a_byte']:.3f} bits a byte")
for order, loss in about["ngrams"].items():
    print(f"  {order}-grams {loss:.3f}")

# %% [markdown]
# ## 3. What far context is worth
#
# The window ends after 128 tokens. If compressed entries were of no use, a token at position 1,500 would be no easier
# to predict than one at position 300, but for what five windows on top of each other carry.

# %%
figure = figures.position_figure(POSITIONS, {"CSA + HCA": ours["by_position"]})

# %% [markdown]
# Files differ, so this comparison of places proves nothing. A better one: take the entries away from *this* model and
# see what it loses. Here the compressors of all layers are made to write zeros. The columns are the places above.

# %%
_, blind = trained.load()
for layer in blind.layers:
    if layer.attention.compressor is not None:
        norm = layer.attention.compressor.norm
        norm.set_value(0.0 * norm[...])
LENGTH, SEQUENCES = 2048, 4
with_entries, without = (
    held_out_losses(m, config, trained.held_out(), LENGTH, SEQUENCES) for m in (model, blind)
)
for name, losses in (("as trained", with_entries), ("entries of zeros", without)):
    print(f"{name:<18}" + "".join(f"{loss:>8.3f}" for loss in by_position(losses)))

# %% [markdown]
# Little, but something everywhere, and most where the context is long. Nine million tokens teach a model to use its
# windows first. Larger gains, as one expects of long context, would need more training. Whether a model *without*
# entries would have learned less in the same time is another question; it was not measured.
#
# ## 4. What it writes
#
# After 2,000 tokens of held-out source, drawn at temperature 0.7 by a seed. (Greedy, so small a model soon repeats itself.)

# %%
engine = Engine(model, config, Numerics(), slots=2, max_length=2304)
prompt = trained.held_out()[:2000]
seq = engine.open()
logits = engine.prefill(seq, prompt)
kept = engine.snapshot(seq)


def choose(logits, position):
    return sample(logits, 0, position, temperature=0.7)


written, _ = generate(engine, seq, logits, 96, choose)
print(trained.decode(prompt[-80:]) + " >>>" + trained.decode(written))

# %% [markdown]
# And reloaded, the same, bit for bit. This is what the gate does (`02_reload_gate`), with a model that has something
# to say.

# %%
again = engine.restore(kept)
rewritten, _ = generate(engine, again, logits, 96, choose)
same = compare(engine.rows(seq), engine.rows(again))
print(f"{same.equal:,} of {same.rows:,} rows are equal; the same text: {written == rewritten}")

# %% [markdown]
# ## What was shown

# %%
assert count(config) <= 6_000_000 and (trained.FOLDER / "model.safetensors").stat().st_size <= 16_000_000
# The figures are those of the weights that are here.
again = held_out_losses(model, config, trained.held_out()[: ours["starts"][1] + 2048], 2048, 2)
assert np.allclose(again.mean(axis=1), ours["sequence_losses"][:2], rtol=1e-4)
assert ours["loss"] < min(about["ngrams"].values())
# Entries help a little, most of all far from the beginning.
difference = np.subtract(by_position(without), by_position(with_entries))
assert 0 < difference.min() == difference[0] and 0.02 < difference.max() == difference[-1] < 0.1
assert written == rewritten and same.same
print("all hold")
