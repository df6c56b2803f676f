# %% [markdown]
# # Selection patterns
#
# A CSA layer does not attend to everything. For each token its indexer picks the k best of all compressed entries, and
# only these are read. If one knew the choice beforehand, most entries could wait in host memory or on disk.
#
# **In part it can be foreseen, and less than one would hope.** Of a small model that was trained on real text, half of
# the visible entries, chosen ahead by a simple rule, hold about four fifths of the next selection; half of them drawn at
# random hold one half. The usual order of hot and cold (first tokens, recent window, shared prefix, the rest) does not
# hold: the window is hot, the first tokens are not. And a cache moves pages: a token needs almost *every* page of 128
# tokens, so that at this size no rule is worth anything. With pages of 16 tokens a history that fades is the best rule,
# half way from random to perfect foresight.
#
# Every number here stands beside what *random* selections would give, for k of n entries overlap with anything by
# chance. At the end: why a page is of no use behind **another prefix**, though it holds the same text.
#
# The model is small: below, layers with a window of 128 tokens only, then CSA (an entry for 4 tokens, 64 of them
# selected) and HCA (an entry for 128 tokens) in turn. What it selects need not be what V4 selects; how to measure it is
# the same.

# %%
import numpy as np

from goldenkv import selection, trained
from goldenkv.config import LayerKind, Numerics
from goldenkv.engine import Engine
from goldenkv.figures import selection as draw
from goldenkv.model.weights import Model
from goldenkv.selection.predictors import Table, chance, oracle, predictors, recall

config, model = trained.load()
text = trained.held_out()
TOKENS = 1536
first, second = text[:TOKENS], text[TOKENS : 2 * TOKENS]
sizes = dict(slots=2, max_length=TOKENS + 96)
engine = Engine(model, config, **sizes)
W, PAGE = config.sliding_window, engine.geometry.page_size
print("layers:", ", ".join(f"{layer} {config.kind(layer).name}" for layer in config.layers))
print("the text that is read, from token 300 on:\n")
print(trained.decode(first[300:380]))

# %% [markdown]
# ## 1. Which entries?
#
# We run 1,536 tokens and write down what each of them selected. As long as no more than 64 entries are there a token
# takes all of them; from token 259 on it has a choice. The blue line is where the window begins: entries to its right
# are in the window too, token by token.
#
# The last picture is the same model with random weights.

# %%
attended = selection.attend_to(engine, model, first)
found = attended.recording
other = selection.record(engine, second)
untrained = selection.record(Engine(Model(config, Numerics(), seed=0), config, **sizes), first)
K, RATIO, CSA = found.top_k, found.ratio, found.layers
maps = {f"layer {layer}": found.mask(i) for i, layer in enumerate(CSA)}
figure = draw.selection_map_figure(
    maps | {f"layer {CSA[-1]}, random weights": untrained.mask(len(CSA) - 1)}, RATIO, W
)

# %% [markdown]
# A warning before the numbers. An index score is a weighted sum of ReLUs: it is exactly 0 where no head responds. If
# fewer than 64 entries have more, the rest is filled with those of the *lowest ids* that have 0. In a picture that is a
# band on the left; in every number below it looks like a stable, hot beginning. (An early checkpoint of this model had
# just that.) How many of the selections were decided by no score?

# %%
by_id = {layer: attended.share_by_id(i) for i, layer in enumerate(CSA)}
for layer, share in by_id.items():
    print(f"layer {layer}: {share:.1%} of the selections were taken for their low id alone")

# %% [markdown]
# ## 2. Is it stable?
#
# How many of a token's 64 entries does the token after it select again? And 64 tokens later? *Random* and *recent* are
# exact: 64 entries drawn anew each time, and always the 64 latest ones.

# %%
LAGS = (1, 2, 4, 8, 16, 32, 64)
stable = {f"layer {layer}": selection.stability(found, i, LAGS) for i, layer in enumerate(CSA)}
stable |= {
    f"layer {layer}, random weights": selection.stability(untrained, i, LAGS) for i, layer in enumerate(CSA)
}
lines = {name: s.lines()["selected"] for name, s in stable.items()}
lines |= {name: stable[f"layer {CSA[0]}"].lines()[name] for name in ("random", "recent")}
figure = draw.stability_figure({"entries that are selected again": lines})

# %%
print(f"{'tokens later':<26}" + "".join(f"{lag:>7}" for lag in LAGS))
for name, (_, values) in lines.items():
    print(f"{name:<26}" + "".join(f"{v:>7.0%}" for v in values))

# %% [markdown]
# ## 3. Hot and cold
#
# Four classes are commonly named, hottest first: **P0** the first 64 tokens (the attention sink), **P1** the recent
# window, **P2** a prefix shared with other requests (here: the first half), **P3** the rest. How hot is each? (Tokens do
# not know that they are shared: to a selection P2 is just what is older. And the rows of the window are read in any
# case, so that to select an entry of P1 as well adds little.)
#
# The *lift* says how many times as often an entry of the class is selected as one drawn at random. The plain rate would
# mislead: the middle exists only when many entries are there, so it looks cold even if selections are random. *By score*
# is the lift without the entries that no score decided. The same for *attention mass*, the softmax weights: they are recomputed from each layer's inputs.

# %%
classes = dict(sinks=64 // RATIO, recent=W // RATIO, prefix=TOKENS // 2 // RATIO)
heats = {
    layer: selection.hotness(found, i, **classes, mass=attended.mass[layer]) for i, layer in enumerate(CSA)
}
scored = {layer: selection.hotness(attended.scored, i, **classes) for i, layer in enumerate(CSA)}
cold = {layer: selection.hotness(untrained, i, **classes) for i, layer in enumerate(CSA)}
print(
    f"{'':<28}{'selected':>10}{'random':>9}{'lift':>7}{'by score':>10}{'of mass':>10}{'its lift':>10}{'random weights':>17}"
)
for layer, rows in heats.items():
    for heat, alone, plain in zip(rows, scored[layer], cold[layer], strict=True):
        print(
            f"layer {layer}, {heat.zone.value:<19}{heat.share:>10.1%}{heat.random:>9.1%}{heat.lift:>7.2f}{alone.lift:>10.2f}"
            f"{heat.mass:>10.1%}{heat.mass_lift:>10.2f}{plain.lift:>17.2f}"
        )
for layer, rows in heats.items():
    order = " > ".join(heat.zone.value[:2] for heat in sorted(rows, key=lambda heat: -heat.lift))
    print(f"layer {layer}: {order}; P0 to P3", "holds" if selection.in_order(rows) else "does NOT hold")

# %%
figure = draw.hotness_figure(
    {
        f"layer {layer}": {heat.zone.value: (heat.lift, heat.mass_lift) for heat in rows}
        for layer, rows in heats.items()
    }
)

# %% [markdown]
# The window gets most of the attention, and the first entries less than their share. A model of this kind has a sink of its own: a learned number in the denominator of the softmax, one a head. Attention
# that goes there goes nowhere. It can stand in for the first tokens, on which other models park such attention.

# %%
sink_share = {layer: float(mass.sink.mean()) for layer, mass in enumerate(attended.mass)}
early = {
    layer: float(np.mean(mass.tokens[W:, :4].sum(axis=1) + mass.entries[W:, :1].sum(axis=1)))
    for layer, mass in enumerate(attended.mass)
}
print(f"{'layer':<40}" + "".join(f"{layer:>8}" for layer in sink_share))
print(f"{'attention on the learned sink':<40}" + "".join(f"{v:>8.1%}" for v in sink_share.values()))
print(f"{'on the first entry, from token 128 on':<40}" + "".join(f"{v:>8.1%}" for v in early.values()))

# %% [markdown]
# ## 4. Can it be foreseen?
#
# A predictor is asked before each token which entries it would keep, and told after it which were selected. It keeps a
# share of the visible ones; how many of the selected are among them? The *oracle* knows the answer and is only limited
# by the budget. The *table* holds rates by age, fitted on another document. *Heavy and recent* is the rule of H2O.

# %%
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
curves = {}
for i, layer in enumerate(CSA):
    known = predictors(Table.fit([other], i))
    curves[layer] = {name: recall(found, i, make(), SHARES).recall for name, make in known.items()}
    curves[layer] |= {"random": chance(found, SHARES).recall, "oracle": oracle(found, i, SHARES).recall}
figure = draw.recall_figure(
    {
        f"layer {layer}": {name: (np.array(SHARES), values) for name, values in of.items()}
        for layer, of in curves.items()
    }
)

# %%
HALF = SHARES.index(1 / 2)
best = {}
for i, (layer, of) in enumerate(curves.items()):
    simple = {name: values[HALF] for name, values in of.items() if name not in ("random", "oracle")}
    best[layer] = max(simple, key=simple.get)
    print(
        f"layer {layer}: half of the entries, chosen by '{best[layer]}', hold {simple[best[layer]]:.0%} of the next selection; "
        f"at random {of['random'][HALF]:.0%}, the oracle {of['oracle'][HALF]:.0%}"
    )
    known = predictors(Table.fit([other], i))
    alone = {name: recall(attended.scored, i, make(), SHARES).recall[HALF] for name, make in known.items()}
    name = max(alone, key=alone.get)
    print(f"         of what scores decided, by '{name}': {alone[name]:.0%}")

# %% [markdown]
# ## 5. In a batch, and across turns
#
# Two requests share the first half and go on differently. Does one select the same shared entries as the other, token
# by token? And in a conversation: the 128 older entries that the last turn selected most, how many of the next turn's
# selections of older entries do they hold?

# %%
half = TOKENS // 2
branch = selection.record(engine, np.concatenate([first[:half], second[half:]]))
talk, turns = selection.record_turns(engine, np.split(first, [half, half + TOKENS // 4]), reply=16)
for i, layer in enumerate(CSA):
    for memory in (1, 16):
        reuse = selection.batch_reuse(found, branch, i, memory)
        print(
            f"layer {layer}, the other request's last {memory:>2} tokens: {reuse.share:.0%} of the selections "
            f"with {reuse.kept:.0f} entries (random {reuse.random:.0%})"
        )
    for number, reuse in enumerate(selection.turn_reuse(talk, i, turns, budget=2 * K), start=2):
        print(
            f"layer {layer}, turn {number}, from the turn before: {reuse.share:.0%} of the selections "
            f"with {reuse.kept:.0f} entries (random {reuse.random:.0%})"
        )
same_prefix = np.array_equal(found.ids[:, :half], branch.ids[:, :half])

# %% [markdown]
# ## 6. What it is worth: pages
#
# A cache moves pages, not entries, and a page holds the entries of all layers. So we replay the selections of the last
# 128 tokens on a device that has room for a part of the pages: what is selected and not there must come. Pages of
# 128 tokens (32 entries) are the smallest that this model's blocks allow; pages of 16 tokens are for comparison.
#
# - *LRU, not fed* knows only when a page was made or fetched. It is what a cache knows that no attention talks to.
# - *Selection-driven* is told what was selected (strategy 2), *fading selection* weighs how often, lately.
# - *Speculative* (strategy 4) also fetches ahead, into an eighth of the room.
# - *Belady* knows the future: nothing that fetches on demand can be better.

# %%
COUNTED = 128
paged, needed_of = {}, {}
for size, capacities in ((PAGE, (6, 9)), (16, (48, 72))):
    steps = selection.page_steps(found, size, since=TOKENS - 2 * COUNTED)
    paged[size] = selection.compare_policies(steps, capacities, since=COUNTED)
    needed = np.mean([len(step.needed) for step in steps[COUNTED:]])
    needed_of[size] = needed
    print(f"pages of {size} tokens: a token needs {needed:.1f} of {TOKENS // size}")
    print(f"  {'pages kept':<28}" + "".join(f"{capacity:>21}" for capacity in capacities))
    for name, results in paged[size].items():
        print(
            f"  {name:<28}" + "".join(f"{f'{one.hit_rate:.1%} ({one.moved:,} moved)':>21}" for one in results)
        )

# %% [markdown]
# And the three signals of speculative prefetch, each alone, over the last 48 tokens:

# %%
tuned = selection.tune(selection.page_steps(found, 16, since=TOKENS - 96), 48, since=48)
for name, one in tuned.items():
    print(f"{name:<28} {one.hit_rate:>7.1%} {one.moved:>7,} moved")

# %% [markdown]
# ## 7. Behind another prefix
#
# The same text stands in many prompts. Why not keep its pages and use them behind any prefix? Because its state is
# not the same. We run one block of 768 tokens behind two prefixes of 384 tokens and compare its rows, by bits.

# %%
quarter = TOKENS // 4
prefix, strange = first[:quarter], second[:quarter]
block, following = first[quarter : 3 * quarter], first[3 * quarter :]
differences = selection.row_differences(engine, strange, prefix, block)
print(f"{'':<24}{'difference':>12}{'equal rows':>12}   equal from row")
for d in differences:
    start = "never" if d.first_equal is None else d.first_equal
    print(f"layer {d.layer}, {d.kind:<14}{d.relative.mean():>13.3f}{d.equal.mean():>12.0%}   {start}")

# %% [markdown]
# Layer 0 makes its rows of single tokens: no difference. Each layer with a window only adds 127 tokens to what a row
# depends on: **window after window**, as in `05_reload_policies`. So the rows of all layers up to the first CSA layer
# become right after some tokens, and the entries and index keys of that layer a little later.
#
# But the *output* of a CSA layer also holds entries that were selected in the whole context. A row of the next layer is
# right only where all that was selected for it is right: luck. An HCA layer reads all entries. So above the first HCA
# layer nothing becomes right for good, however long the block is.
#
# Now we use such pages: a run goes on with the block's pages from behind the other prefix; windows and all else
# stay exact. What does it do to the tokens that follow? For scale: pages of another text altogether.

# %%
splicer = selection.Splicer(engine, prefix, block, following)
splices = {"the same prefix": splicer.splice(prefix), "another prefix": splicer.splice(strange)}
for layer in CSA:
    splices[f"another, layer {layer} only"] = splicer.splice(strange, layers=[layer])
splices["another text"] = splicer.splice(prefix, block=second[quarter : 3 * quarter])
print(f"{'pages from behind':<26}{'KL (nats)':>12}{'loss':>9}{'exact loss':>12}{'same choice':>13}")
for name, s in splices.items():
    kl = "0, bit-equal" if s.equal else f"{s.divergence:.2g}"
    print(f"{name:<26}{kl:>12}{s.loss:>9.3f}{s.exact_loss:>12.3f}{s.agreement:>13.1%}")

# %%
rows = {d.layer: (np.arange(len(block)), d.relative * ~d.equal) for d in differences if d.kind == "window"}
figure = draw.splice_figure(rows, {name: s.divergence for name, s in splices.items()})

# %% [markdown]
# Nothing raises an error, and the text goes on. Whoever splices such pages in serves another model than the one that
# was asked for. Here keys hold the whole prefix, so such a page is never found.
#
# ## What was shown

# %%
# Selections: everything up to token 258, then 64 each, of a real choice; the map is causal.
counts = found.mask(0).sum(axis=1)
assert (counts == np.minimum(found.visible, K)).all() and found.first_choice == 4 * (K + 1) - 1
assert all(share < 0.01 for share in by_id.values())
assert same_prefix  # a shared prefix selects the same, whatever follows

# In some layer the trained model's selections overlap more than random ones and more than those of random weights, at
# every lag. In each the best predictor beats chance; none beats the oracle, which no honest one can.
assert any(
    (s.overlap > np.maximum(s.random, stable[f"{name}, random weights"].overlap)).all()
    for name, s in stable.items()
    if f"{name}, random weights" in stable
)
for layer in CSA:
    of = curves[layer]
    assert of["random"][HALF] < of[best[layer]][HALF] < of["oracle"][HALF] + 1e-9
    assert all((values <= of["oracle"] + 1e-9).all() for values in of.values())
    assert all(abs(values[-1] - 1) < 1e-9 for values in of.values())
    assert 0.7 < of[best[layer]][HALF] < 0.9 and of["oracle"][HALF] > 0.9
# The order of hot and cold does not hold; the window is hottest by attention, the first entries get less than their share.
for rows_of_layer in heats.values():
    heat_of = {heat.zone.value[:2]: heat for heat in rows_of_layer}
    assert not selection.in_order(rows_of_layer)
    assert heat_of["P0"].mass_lift < 1 < heat_of["P1"].mass_lift and heat_of["P1"].mass > 0.5
# Almost every large page is needed, and no rule gains; on small pages fading history is the best that looks back.
assert needed_of[PAGE] > 0.95 * (TOKENS // PAGE)
hits = {size: {name: of[0].hit_rate for name, of in results.items()} for size, results in paged.items()}
assert abs(hits[PAGE]["fading selection"] - hits[PAGE]["random"]) < 0.02
small = hits[16]
assert small["fading selection"] == max(rate for name, rate in small.items() if name != "Belady")
assert 0.3 < (small["fading selection"] - small["random"]) / (small["Belady"] - small["random"]) < 0.7
# Shares of all classes add up; attention adds up with the learned sink.
for rows_of_layer in heats.values():
    for what in ("share", "random", "mass"):
        assert abs(sum(getattr(heat, what) for heat in rows_of_layer) - 1) < 1e-5
for mass in attended.mass:
    assert np.allclose(mass.sink + mass.tokens.sum(axis=1) + mass.entries.sum(axis=1), 1, atol=1e-4)
assert all(0 < share < 1 for share in sink_share.values())

# No policy that fetches on demand beats Belady's rule.
for results in paged.values():
    for name, of in results.items():
        if name != "speculative":
            assert all(a.hits <= b.hits for a, b in zip(of, results["Belady"], strict=True)), name

# Behind another prefix: exact, to the bit, as far as windows reach, and above the first HCA layer never for good.
by = {(d.layer, d.kind): d for d in differences}
hca = next(layer for layer in config.layers if config.kind(layer) is LayerKind.HCA)
assert [by[layer, "window"].first_equal for layer in range(CSA[0] + 1)] == [
    layer * (W - 1) for layer in range(CSA[0] + 1)
]
reach = -(-CSA[0] * (W - 1) // RATIO) + 1  # an entry takes the block before its own too
assert by[CSA[0], "entries"].first_equal == by[CSA[0], "index_keys"].first_equal == reach
assert all(by[layer, "window"].first_equal is None for layer in config.layers if layer > hca)
assert splices["the same prefix"].equal and splices["the same prefix"].divergence == 0
assert all(not s.equal and s.divergence > 0 for name, s in splices.items() if name != "the same prefix")
assert splices["another prefix"].divergence < splices["another text"].divergence
print("all hold")
