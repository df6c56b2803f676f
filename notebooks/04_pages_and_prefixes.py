# %% [markdown]
# # Pages and prefixes
#
# Many requests begin with the same words: a system prompt, a document, everything that was said before in a
# conversation. What the model made of these words is state, and state costs time to make. So engines keep it and
# use it again. This notebook shows how many sequences share state without a single wrong bit:
#
# 1. **pages**, the pieces in which state is shared, and **copy-on-write**,
# 2. **keys**, which say what a page holds: it depends on everything before it, and on whose it is,
# 3. the **tree** in which prefixes are found, and how it grows, splits and shrinks,
# 4. what a request that was asked before costs,
# 5. what leaves first when there is no room.
#
# Everything runs on a real engine with a real cache, only small: the window has 8 tokens, CSA blocks 4, HCA blocks 8
# (in V4: 128, 4 and 128), and the weights are random. A byte of text is a token. CSA, HCA and the window are
# explained in `01_attention_from_scratch`, what state must survive in `02_reload_gate`.

# %%
from dataclasses import replace

import numpy as np

from goldenkv import figures
from goldenkv.config import Numerics, micro
from goldenkv.engine import Engine, ForeignNamespace, PrefixCache
from goldenkv.model.weights import Model
from goldenkv.prefix import (
    LRU,
    Composite,
    Namespace,
    PageKeys,
    Public,
    PublicDomains,
    Tenant,
    TensorParallel,
    UndeclaredDomain,
    content_digest,
)
from goldenkv.state import cells, compare
from goldenkv.text import byte_tokens

# %%
PAGE = 16
config = replace(micro(), vocab_size=256)
numerics = Numerics(tile=8, index_block=8, key_block=8)
model = Model(config, numerics, seed=0)


def new_engine():
    """Freed pages are filled with NaN: whoever still used one would show it."""
    sizes = dict(slots=4, max_length=192, page_size=PAGE, pages=40, boundaries=40)
    return Engine(model, config, numerics, **sizes, fill=np.nan, poison=True)


def ids(text):
    return byte_tokens(text, config.vocab_size)


cold_engine = new_engine()


def cold(tokens):
    """State and logits of a run from nothing."""
    seq = cold_engine.open()
    logits = cold_engine.prefill(seq, tokens)
    rows = cold_engine.rows(seq) | {"logits": logits[None]}
    cold_engine.close(seq)
    return rows


print("layers:", ", ".join(f"{layer} {config.kind(layer).name}" for layer in config.layers))
print(f"pages of {PAGE} tokens")

# %% [markdown]
# ## 1. Pages and copy-on-write
#
# The state of a sequence has two parts. *Boundary* state (window, rows of unfinished blocks, overlap) belongs to the
# place where the sequence ends. *Paged* state only grows: entries and index keys never change once they are made.
# Page i of a sequence holds those of tokens 16 i to 16 i + 15:

# %%
for cell in cells(config):
    if cell.component.paged:
        print(f"{cell.name:<20} {PAGE // config.compress_ratios[cell.layer]} rows a page")

# %% [markdown]
# A page must hold whole blocks of every layer, or it would hold a piece of an entry. So its size is a multiple of 8
# here, and of 128 in V4.
#
# A sequence does not own places in memory; it has a **page table**: a list of page numbers. Two sequences can have
# the same page in their tables. The pool counts the **holders** of each page. The rule is: *who wants to write
# into a page that others hold too gets a copy first.* A number in a coloured box below is the place of the page in
# the page table of its row.

# %%
engine = new_engine()
SHOWN = 6  # pages of the pool in the picture
moments = []


def look(title, **sequences):
    tables = {name: list(seq.pages) for name, seq in sequences.items()}
    moments.append(figures.Holding(title, tables, [engine.holders(page) for page in range(SHOWN)]))


text_a = "Now is better than never. Although never"  # 40 tokens: two whole pages, and half of a third
a = engine.open()
engine.prefill(a, ids(text_a))
look("1. A has run 40 tokens", A=a)

b = engine.fork(a)
look("2. B forks A: no page is copied", A=a, B=b)

engine.prefill(b, ids(" is"))
look("3. B writes into the third page: it is copied", A=a, B=b)

engine.prefill(a, ids(" is often better"))
look("4. A writes too: alone in its page by now, it needs no copy", A=a, B=b)

whole_a, whole_b = engine.rows(a), engine.rows(b)
engine.close(a)
look("5. A ends: what B holds stays", B=b)

after_end = engine.rows(b)
engine.close(b)
look("6. B ends", B=b)

figure = figures.pages_figure(moments)

# %% [markdown]
# Did anybody's state suffer? We compare with runs from nothing, bit by bit:

# %%
expected_a, expected_b = cold(ids(text_a + " is often better")), cold(ids(text_a + " is"))
fork_checks = {
    "A after both have written": compare(whole_a, {n: expected_a[n] for n in whole_a}),
    "B after both have written": compare(whole_b, {n: expected_b[n] for n in whole_b}),
    "B after A has ended": compare(after_end, {n: expected_b[n] for n in after_end}),
}
for name, found in fork_checks.items():
    print(f"{name + ':':<27} {found.equal} of {found.rows} rows have the bits of a run from nothing")

# %% [markdown]
# B lies in pages 0, 1 and 3, and the run from nothing in pages 0, 1 and 2. Where a page lies changes no bit.
#
# ## 2. Under another prefix it is another page
#
# Two prompts hold the same 48 tokens, at the same places, in pages 1 to 3. Only page 0 differs. Could they share
# pages 1 to 3? We run both and compare the pages row by row.

# %%
common = "If the implementation is hard to explain, it's a"
prompts = ["Use your head.\n>" + common, "Think like this>" + common]
assert {len(ids(p)) for p in prompts} == {4 * PAGE}

one, other = (cold(ids(prompt)) for prompt in prompts)
page_differs = {}
print("rows with other bits in    page 1   page 2   page 3")
for cell in cells(config):
    if cell.component.paged:
        rows = PAGE // config.compress_ratios[cell.layer]
        differs = ~compare({"": one[cell.name]}, {"": other[cell.name]}).by_name[""]
        page_differs[cell.name] = [int(part.sum()) for part in differs.reshape(4, rows)]
        print(f"{cell.name:<22}" + "".join(f"{n:>6} of {rows}" for n in page_differs[cell.name][1:]))

# %% [markdown]
# No. A token's row is made from its layer's *input*, and that has seen the tokens before it:
#
# - In layer 1 the difference reaches only the start of page 1. Its input comes from layer 0, which sees no further
#   than its window of 8 tokens.
# - In layer 2 it can reach any page: layer 1 sees *all* entries before a token, and selects some.
#
# So how far it reaches depends on the layers, on what the indexer selects, on the words. There is no rule by which an
# engine could tell that a page is still good. Therefore:
#
# > A page belongs to its **whole prefix**. The same tokens after other tokens are another page.
#
# ### Keys
#
# A key is a name for what a page holds. It is a cryptographic hash (BLAKE2b, 32 bytes) over the page's tokens *and the
# key of the page before it*. So a key stands for all tokens from the start. The first key of the chain starts from the
# **namespace**, which holds everything besides tokens that must not be mixed.
#
# (The model has a digest too. Here it is one of a made-up name, so that these keys are the same on every machine.)


# %%
def namespace(domain, engine=None, **changes):
    """Who it belongs to, and what made it."""
    fields = dict(
        domain=domain,
        model=content_digest(b"an example") if engine is None else engine.fingerprint,
        tokenizer=None,
        chat_template=None,
        layout="rows",
        page_size=PAGE,
        dtype="float32",
        tensor_parallel=TensorParallel(size=1, rank=0, split="none"),
        adapter=None,
        media=(),
        salt=None,
    )
    return Namespace(**(fields | changes))


anna = Tenant("anna", secret=b"sixteen bytes or more: anna's")
bert = Tenant("bert", secret=b"sixteen bytes or more: bert's")
shared = Public("handbook", declared=PublicDomains(frozenset({"handbook"})))

chains = [PageKeys(namespace(anna), ids(prompt)).pages for prompt in prompts]
print("first 8 of 64 hexadecimal digits\n")
print("page   tokens              after 'Use your head.'   after 'Think like this'")
for page in range(4):
    shown = [prompt[page * PAGE : (page + 1) * PAGE].replace("\n", "↵") for prompt in prompts]
    middle = shown[0] if shown[0] == shown[1] else "(not the same)"
    print(f"{page:>4}   {middle:<19} {chains[0][page].hex()[:8]:<24} {chains[1][page].hex()[:8]}")

# %% [markdown]
# ### Whose page is it?
#
# The same tokens, in other namespaces. A secret takes part in the keys of a tenant: who knows all the tokens still
# cannot make them. What is to be shared by all tenants lies in a domain that the *server* has declared public; no text
# that a user sends can declare one.

# %%
variants = {
    "tenant anna": namespace(anna),
    "tenant bert": namespace(bert),
    "anna, another secret": namespace(Tenant("anna", secret=b"a new secret for anna, 2 of 2")),
    "public domain handbook": namespace(shared),
    "anna, a salt": namespace(anna, salt="a"),
    "anna, an adapter": namespace(anna, adapter=content_digest(b"weights of an adapter")),
    "anna, other chat template": namespace(anna, chat_template=content_digest(b"<user>")),
}
keys_of = {name: PageKeys(space, ids(prompts[0])).pages for name, space in variants.items()}
print(f"{'':<27} page 0     page 1")
for name, keys in keys_of.items():
    print(f"{name:<27} {keys[0].hex()[:8]}   {keys[1].hex()[:8]}")

undeclared = False
try:
    Public("news", declared=PublicDomains(frozenset({"handbook"})))
except UndeclaredDomain as error:
    undeclared = True
    print(f"\nrefused: {error}")

# %% [markdown]
# Now in a real cache. Anna and Bert ask the same in turn, each twice. Then both ask it in the public domain.

# %%
cache = PrefixCache(new_engine())
live = {
    who: namespace(domain, cache.engine)
    for who, domain in (("anna", anna), ("bert", bert), ("public", shared))
}
question = ids("In the face of ambiguity, refuse the temptation to guess.")


def ask(cache, space, tokens):
    """One request from begin to finish. What it counted, and whether its bits are those of a run from nothing."""
    before = replace(cache.metrics)
    request = cache.begin(space, tokens)
    logits = cache.run(request)
    same = compare(cache.engine.rows(request.seq) | {"logits": logits[None]}, cold(tokens)).same
    cache.finish(request)
    counts = {
        n: getattr(cache.metrics, n) - getattr(before, n)
        for n in ("prompt", "reused", "replayed", "computed")
    }
    return counts | {"same": same}


asked = []
for who in ("anna", "bert", "anna", "bert", "public", "public"):
    asked.append((who, ask(cache, live[who], question)))
    counts = asked[-1][1]
    print(
        f"{who:<7} {counts['reused']:>3} of {counts['prompt']} tokens reused   bits of a run from nothing: {counts['same']}"
    )

figure = figures.trees_figure(
    [figures.tree_frame("the same tokens in three namespaces: the pages have other ids", cache.tree)],
    namespaces={space.digest(): who for who, space in live.items()},
    texts=True,
)

# %% [markdown]
# (One row of boxes is one namespace. A number is the id of the page in the pool. The text below it is what its tokens
# say; ␣ is a space. Blue bars are explained below.) Each tenant's first question finds nothing although the pages of
# the other are there. If the answer came faster, Bert could find out what Anna had asked.
#
# The last condition is the model. A namespace of another model, other numerics or another page size is refused:

# %%
foreign = False
try:
    cache.begin(namespace(anna), question)
except ForeignNamespace:
    foreign = True
print("state of another model refused:", foreign)

# %% [markdown]
# ## 3. The tree
#
# Finding the longest prefix that is there is a walk down a **radix tree**. A **node** is a run of pages that are
# shared together. Nodes are as long as possible: the tree splits a node only where two sequences part.
#
# Besides pages there are **boundary states** (blue bars). A page alone is not enough to go on: after it one needs the
# window and the overlap *at that place*. Here the cache keeps them at the end of every page. Other policies keep
# fewer: see `05_reload_policies`.
#
# We watch a tree while requests come. Orange is new in each step.

# %%
cache = PrefixCache(new_engine())
space = live["anna"]
SYSTEM = "The Zen of Python, by Tim Peters"  # two pages
talk = {
    "A": SYSTEM + "Beautiful is better than ugly. " + "Flat is",
    "B": SYSTEM + "Explicit is better than implicit." + " Why?",
    "C": SYSTEM + "Explicit is bett" + "er: in which way",
}
frames = []


def step(title):
    frames.append(figures.tree_frame(title, cache.tree))
    cache.tree.check()  # every invariant of the tree


first_a = ask(cache, space, ids(talk["A"]))
step("1. A asks. Its four whole pages are one node")

first_b = ask(cache, space, ids(talk["B"]))
step("2. B asks: the first two pages are there, and the node splits behind them")

next_turn = talk["A"] + " better than nested. Why so?"
second_a = ask(cache, space, ids(next_turn))
step("3. A's next turn goes on where its first one ended")

request = cache.begin(space, ids(talk["C"]))
cache.run(request)
step("4. C parts from B one page later. It is still running: its path is locked")

cache.evict(pages=4)
step("5. Four pages must go while C runs. Only ends of paths can leave, and nothing that is locked")

cache.finish(request)
again_b = ask(cache, space, ids(talk["B"]))
step("6. C is done. B asks again: what had left is computed once more")

figure = figures.trees_figure(frames, texts=True)

# %% [markdown]
# A page never leaves before those behind it: they would be of no use without it. So a tree shrinks from the ends.
# A boundary state leaves with its page, or before it if only states are short.
#
# The ids in step 6 are those of pages that were freed in step 5. That is why freed pages are full of NaN here: a
# request that still read one would not have gone unnoticed.

# %% [markdown]
# ## 4. Asked again
#
# What does a prompt cost that was asked before? The cache counts each token of a prompt exactly once: **reused** (not
# run), **replayed** (run again although its entries are there) or **computed**.

# %%
story = [("A", first_a), ("B", first_b), ("A, next turn", second_a), ("B, after step 5", again_b)]
for name, text in (
    ("A, next turn, again", next_turn),
    ("and again", next_turn),
    ("its first 64 tokens", next_turn[:64]),
):
    story.append((name, ask(cache, space, ids(text))))
print(
    f"{'request':<21} {'prompt':>6} {'reused':>7} {'replayed':>9} {'computed':>9}   bits of a run from nothing"
)
for name, c in story:
    print(f"{name:<21} {c['prompt']:>6} {c['reused']:>7} {c['replayed']:>9} {c['computed']:>9}   {c['same']}")
total = cache.metrics
print(
    f"\n{total.requests} requests: {total.prompt} = {total.reused} reused + {total.replayed} replayed + {total.computed} computed"
)

# %% [markdown]
# (C is in the sum only.) What had left in step 5 is computed again. After that only the tail behind the last whole page
# runs: 2 tokens of 98. If a prompt ends exactly at the end of a page, that page still runs: somebody has to make the
# logits of the last token, and logits are not kept.
#
# A hit counts once its keys are checked: each page and each boundary state must carry the key that *this* request's
# tokens and namespace give. If one does not, the hit is refused, and the tokens are computed.
#
# ## 5. What leaves first
#
# When no page is free, something must go. The tree says what *may* leave: ends of paths that nobody uses. A
# **strategy** says what of it leaves *first*. Two of them:
#
# - **LRU**: what was used longest ago.
# - **Composite**: the same, but each doubling of the hits, or of the sequences that share a page, counts like a use
#   16 requests later.
#
# A popular question is asked four times. Then three others come, each once. Now pages must leave, one at a time.

# %%
popular = SYSTEM + "How should I name my variables?"
rare = [
    SYSTEM + "What is a list? " + "Please be brief.",
    SYSTEM + "Is it " + "friday today? " * 2,
    "What is the weather like in Rome and in Oslo?",
]
runs, after = {}, {}
for name, strategy in (("LRU", LRU()), ("Composite", Composite())):
    cache = PrefixCache(new_engine(), strategy=strategy)
    space = namespace(anna, cache.engine)
    for prompt in [popular] * 4 + rare:
        ask(cache, space, ids(prompt))
    shots = [figures.tree_frame("before", cache.tree)]
    for _ in range(4):
        cache.evict(pages=1)
        shots.append(figures.tree_frame("", cache.tree))
    after[name] = ask(cache, space, ids(popular))
    runs[f"{name}: four pages leave, in this order"] = shots

figure = figures.eviction_figure(runs)
for name, counts in after.items():
    print(
        f"{name:<10} the popular question once more: {counts['reused']} of {counts['prompt']} tokens reused"
    )

# %% [markdown]
# (1 left first.) To LRU the popular question is the oldest: its page goes first of all, and whoever asks it next pays.
# To Composite its three hits weigh more. Both keep the system prompt, because pages behind it are still there.
#
# A strategy changes what is found, never what is computed: the bits are those of a run from nothing in any case.
#
# ## What was shown

# %%
# Forks share pages until one of them writes, and nobody's bits change.
tables = [frame.tables for frame in moments]
assert (
    tables[1]["A"] == tables[1]["B"]
    and tables[2]["B"] == [*tables[1]["B"][:2], 3]
    and tables[2]["A"] == tables[1]["A"]
)
assert [frame.counts for frame in moments] == [
    [1, 1, 1, 0, 0, 0], [2, 2, 2, 0, 0, 0], [2, 2, 1, 1, 0, 0], [2, 2, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0], [0] * 6
]  # fmt: skip
assert all(found.same for found in fork_checks.values())

# The same tokens under another prefix: other bits, near the difference in layer 1, in all pages in layer 2.
assert page_differs["layers.1.entries"][1] > 0 and page_differs["layers.1.entries"][3] == 0
assert all(page_differs["layers.2.entries"])
# Keys are chained: no page has the key that the same tokens have under another prefix.
assert not set(chains[0]) & set(chains[1])
common_start = PageKeys(namespace(anna), ids(prompts[0][: 2 * PAGE])).pages
assert common_start == chains[0][:2]

# Each namespace has keys of its own, and finds nothing of another's.
assert len({key for keys in keys_of.values() for key in keys}) == 4 * len(variants)
assert undeclared and foreign
assert [(who, counts["reused"]) for who, counts in asked] == [
    ("anna", 0), ("bert", 0), ("anna", 48), ("bert", 48), ("public", 0), ("public", 48)
]  # fmt: skip

# The tree: nodes split where sequences part; what is locked stays; ends of paths leave.
ids_in = [{leaf.page for leaf in frame.pages.values()} for frame in frames]
nodes_in = [len({leaf.node for leaf in frame.pages.values()}) for frame in frames]
assert [len(found) for found in ids_in] == [4, 6, 8, 9, 5, 6] and nodes_in[:4] == [1, 3, 4, 6]
locked = {leaf.page for leaf in frames[3].pages.values() if leaf.locks}
assert locked and locked <= ids_in[4] and not any(leaf.locks for leaf in frames[5].pages.values())

# Every token of every prompt was counted once, and all answers have the bits of a run from nothing.
answers = [c for _, c in story + asked] + list(after.values())
assert all(c["same"] for c in answers)
assert all(c["prompt"] == c["reused"] + c["replayed"] + c["computed"] for c in answers)
assert total.prompt == total.reused + total.replayed + total.computed and total.refused == 0
assert [c["computed"] for _, c in story] == [70, 38, 34, 22, 50, 2, 16]

# Asked once more, the popular question is found by one strategy and not by the other.
assert after["LRU"]["reused"] == 32 and after["Composite"]["reused"] == 48
print("all hold")
