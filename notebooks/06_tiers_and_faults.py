# %% [markdown]
# # Tiers and faults
#
# The device has little memory, and what leaves it would have to be computed again. So state goes down: to host memory,
# to a disk, to a store on the network. When a prompt needs it, it comes back up. This notebook shows three things:
#
# 1. what that is worth: agent sessions through caches of shrinking capacity,
# 2. from which length on it is worth the time: **reload against recompute**,
# 3. what happens when something breaks. A store may lose, damage or delay what it holds. It must never change an answer.
#
# The model is small and its weights are random: windows of 8 tokens, CSA blocks of 4, HCA blocks of 8, pages of 16
# tokens. The stores are real. Boundary states, replays and policies are explained in `05_reload_policies`.

# %%
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from goldenkv import figures
from goldenkv.capacity import read_model, snapshot_bytes
from goldenkv.config import Numerics, micro
from goldenkv.engine import EndPoints, Engine, TieredCache
from goldenkv.figures import decimal_size as size
from goldenkv.model.weights import Model
from goldenkv.prefix import Namespace, Tenant, TensorParallel
from goldenkv.text import byte_tokens, default_text
from goldenkv.tier_study import (
    Inline,
    cold,
    crossover,
    drill,
    growing,
    interleaved,
    read_sessions,
    serve,
)
from goldenkv.tiers.disk import DiskStore
from goldenkv.tiers.faults import Faulty, Flip, Lose
from goldenkv.tiers.host import HostStore
from goldenkv.tiers.mover import Mover
from goldenkv.tiers.shelf import Tier, Write

# Agent sessions with their text, or a folder of yours with .jsonl or .txt files.
FOLDER = Path("../../shared/traces/agent_text")

# %%
PAGE, LONGEST, PAGES = 16, 400, 160
config = replace(micro(), vocab_size=256)
numerics = Numerics(tile=16, index_block=8, key_block=8)
sizes = dict(slots=2, max_length=LONGEST, page_size=PAGE, pages=PAGES, boundaries=40)
# Freed pages are filled with NaN: whoever still used one would show it.
engine = Engine(Model(config, numerics, seed=0), config, numerics, **sizes, fill=np.nan, poison=True)
space = Namespace(
    domain=Tenant("anna", secret=None),
    model=engine.fingerprint,
    tokenizer=None,
    chat_template=None,
    layout="pool",
    page_size=PAGE,
    dtype=numerics.dtype,
    tensor_parallel=TensorParallel(size=1, rank=0, split="none"),
    adapter=None,
    media=(),
    salt=None,
)

# %% [markdown]
# ## 1. What a tier is
#
# A **tier** is a store under the device: larger, and further away. It holds **objects**: a page, a *tail* (a page that its
# tokens do not fill), or a boundary state. An object goes down when it is made (write-through), or when it leaves the
# tier above (write-back). It comes up when a prompt needs it, and stays below as well. Every object carries
# its name (owner, namespace, key), its layout, and a checksum of its bytes and one of its head; all are checked before
# a byte is used. What is missing, late or damaged is computed: a tier can save time, and cannot be relied on for more.
#
# Here are the objects of a prompt of 101 tokens, and what they would be in V4-Flash, with pages of 256 tokens:

# %%
v4 = read_model("flash")
example = np.random.default_rng(0).integers(0, config.vocab_size, 101)
store = HostStore(1 << 20, block=256)
mover = Mover([Tier(store=store)], PAGE, workers=Inline())
cache = TieredCache(engine, mover, EndPoints())
request = cache.begin(space, example)
cache.run(request)
cache.finish(request)
labels = sorted((store.get(entry.address).label for entry in store.scan()), key=lambda label: label.position)
in_flash = {
    "page": f"{size(v4.growing_bytes(256))}",
    "tail": "the part that is filled",
    "boundary": f"{size(snapshot_bytes(v4.v4, v4.format, 1024))} at a multiple of 128",
}
print(f"{'object':<10} {'at the end of':<25} {'bytes':>6}   in V4-Flash")
kinds = {}
for kind in ("page", "tail", "boundary"):
    found = [label for label in labels if label.kind.value == kind]
    kinds[kind] = [label.position for label in found]
    at = ", ".join(str(position) for position in kinds[kind])
    print(f"{kind:<10} {at:<25} {found[0].nbytes:>6,}   {in_flash[kind]}")
cache.forget(space)
left_of_it = store.stats().objects
mover.close()

# %% [markdown]
# ## 2. Sessions under shrinking capacity
#
# The text: sessions of a coding agent, as they were sent to a model. Each turn sends all that was said before and what is
# new, so a prompt begins with the one before it. In the trace the sessions ran one after the other. Here they are mixed,
# and it is chance whose turn it is: so they compete for room.
#
# A byte is a token. To keep it quick only every 32nd byte is taken: all lengths become 32 times shorter, and what is a
# prefix of what stays as it is.

# %%
SESSIONS, TURNS, EVERY = 6, 8, 32
if FOLDER.is_dir():
    source, texts = f"the sessions in {FOLDER.name}", read_sessions(FOLDER, TURNS)
else:
    source, whole = "Python's language reference, cut into sessions", default_text()
    texts = [growing(whole[at : at + 12_000], TURNS) for at in range(0, 12_000 * SESSIONS, 12_000)]
thinned = [[byte_tokens(text, config.vocab_size)[::EVERY] for text in session] for session in texts]
fitting = [[prompt for prompt in session if 0 < len(prompt) <= LONGEST][:TURNS] for session in thinned]
sessions = [session for session in fitting if session][:SESSIONS]
prompts = interleaved(sessions, seed=0)
total = sum(len(prompt) for prompt in prompts)
different = {
    prompt[: end * PAGE].tobytes() for prompt in prompts for end in range(1, len(prompt) // PAGE + 1)
}
print(f"{source}: {len(prompts)} prompts of {len(sessions)} sessions, {total:,} tokens")
print(f"{len(different)} different whole pages, if all were kept")

# %% [markdown]
# Each prompt is run once from nothing ("cold"): its logits and its whole state are what every answer below is compared
# with. Then the same prompts go through caches. They keep a boundary state every 64 tokens. The host and the disk get
# what leaves the tier above.
#
# The pages of the device become fewer; then a host is put under the smallest device, and becomes smaller; then a
# disk under that.

# %%
expected = [cold(engine, prompt) for prompt in prompts]
runs = {}


def run(name, pages, host=0, disk=None):
    """All prompts; capacities in pages and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = [Tier(store=HostStore(host, block=256), write=Write.BACK)] if host else []
        tiers += [Tier(store=DiskStore(folder, disk), write=Write.BACK)] if disk else []
        runs[name] = serve(engine, space, prompts, expected, tiers, pages=pages, period=64)


WITHOUT_LIMIT = 1 << 40
run("device 160 pages", pages=160)
run("device 80 pages", pages=80)
run("device 40 pages", pages=40)
run("device 40, host 256 kB", pages=40, host=256_000)
run("device 40, host 128 kB", pages=40, host=128_000)
run("device 40, host 64 kB", pages=40, host=64_000)
run("device 40, host 64 kB, disk 128 kB", pages=40, host=64_000, disk=128_000)
run("device 40, host 64 kB, disk without limit", pages=40, host=64_000, disk=WITHOUT_LIMIT)
figure = figures.sources_figure(runs)

# %%
columns = ("device", "host", "disk", "replayed", "computed")
print(f"{'':<41}" + "".join(f"{name:>9}" for name in columns) + f"{'sum':>9}   bits of a cold run")
for name, found in runs.items():
    counts = "".join(f"{found.sources.get(column, 0):>9,}" for column in columns)
    print(f"{name:<41}{counts}{found.tokens:>9,}   {found.equal} of {found.requests} answers")

# %% [markdown]
# - A token is counted **once**, by where its state came from, and only after it was verified and used. So every line sums
#   to the tokens of all prompts.
# - With less room more is computed, and **no bit changes**: neither of the logits nor of the state.
# - Tiers give back what the device has no room for: 40 pages with a large enough tier below find as much as 160 pages.
# - What moves to the disk when the host becomes smaller is not lost, it is only further away.
# - "Tokens found" and "requests found" are two numbers. A request counts as found if it reuses anything at all, be it one
#   page. That is the nicer number here, and it says less: what is saved is tokens.
#
# ## 3. Is a reload worth it?
#
# A reload takes time as well: look-ups, round trips, checksums, copies. The times below were measured by `make bench` on a
# model of six layers, width 256, on two CPU cores. They are a file beside this notebook, not made by it.

# %%
measured = json.loads(Path("measured/tiers.json").read_text())["reload"]
lengths, computing = measured["tokens"], measured["recompute_s"]
reloads = {name: measured[f"{name}_s"] for name in ("host", "disk", "redis")}
figure = figures.crossover_figure(lengths, computing, reloads)

# %%
crossings = {name: crossover(lengths, seconds, computing) for name, seconds in reloads.items()}
for name, at in crossings.items():
    print(
        f"from {name + ':':<7} faster than computing from {at:,.0f} tokens on"
        if at
        else f"from {name}: never faster"
    )

# %% [markdown]
# The curves of the tiers are flat at first: a short reload is all fixed costs. Computing has none, and grows with every
# token. A ring marks where they cross; where there is none the reload is faster at every length that was measured.
#
# ### V4-Flash on real hardware
#
# Public estimates (`aiconfigurator`, FP8 on eight H200) give about 11,500 prefill tokens a second and GPU. A prompt's state
# must come in the time in which it would be computed. So there is a **break-even bandwidth**: bytes of the state over
# seconds of computing.

# %%
PREFILL = 11_500
flash_rows = []
print(f"{'prompt':>8} {'computed in':>12} {'pages':>9} {'boundary':>9} {'break-even':>12} {'at 1 GB/s':>10}")
for length in (128, 512, 2048, 8192, 32_768, 131_072):
    pages, boundary = v4.growing_bytes(length), snapshot_bytes(v4.v4, v4.format, length)
    seconds = length / PREFILL
    flash_rows.append(((pages + boundary) / seconds, seconds, (pages + boundary) / 1e9))
    print(
        f"{length:>8,} {seconds * 1e3:>9,.0f} ms {size(pages):>9} {size(boundary):>9} "
        f"{size(flash_rows[-1][0]):>10}/s {flash_rows[-1][2] * 1e3:>7,.0f} ms"
    )
token_bandwidth = v4.bytes_a_token() * PREFILL
print(f"\na token alone: {v4.bytes_a_token():,.0f} bytes x {PREFILL:,} = {size(token_bandwidth)}/s")

# %% [markdown]
# **About 40 to 50 MB/s** are enough from a few thousand tokens on. A fast disk gives some 2 GB/s, a
# network card of 100 Gbit/s 12 GB/s. So bandwidth decides nothing here. What decides are fixed costs: the look-up, round trips, queueing,
# and for short prompts the boundary state, which is as large for 128 tokens as for 131,072. They decide from which length
# on a reload is worth it, and so how long a prompt may wait for one: a deadline.
#
# ## 4. A fault drill
#
# The first 96 tokens of the prompt of 101 are stored: six pages, and boundary states after 32, 64 and 96 tokens. The device
# forgets them. Then something breaks, mostly about the fourth page, and the prompt is asked again. Whatever happens, the
# answer must have the bits of a cold run, and the reason must be counted.

# %%
STORED, BROKEN = 96, 3
example_expected = cold(engine, example)


def host(**options):
    return Faulty(HostStore(1 << 20, block=256, **options))


def losing():
    """Says that it keeps the fourth page (that is the fifth put, after a boundary state), and does not."""
    store = host()
    store.add(Lose(), nth=5)
    return store


def disk(**options):
    return DiskStore(tempfile.mkdtemp(dir=drill_folder.name), **options)


def down(store, page):
    store.down()


def evict(store, page):
    store.delete([page])


def noise(store, page):
    store.add(Flip(bit=-1))


def rot(store, page):
    """A bit flips in the file; nobody has written it, so its time stays."""
    path = store.places.object(page)
    times = os.stat(path)
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 0x80
    Path(path).write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def cut(store, page):
    os.truncate(store.places.object(page), os.path.getsize(store.places.object(page)) - 1)


def swap(store, page):
    """Another file in its place: whole, and of the right size."""
    path = Path(store.places.object(page))
    other = next(file for file in sorted(path.parent.iterdir()) if file != path and same_size(file, path))
    shutil.copyfile(other, path)


def same_size(one, other):
    return one.stat().st_size == other.stat().st_size


def wipe(store, page):
    shutil.rmtree(store.places.objects)


# fault: (the store, what breaks, the reason that must be counted)
FAULTS = {
    "none": (host, {}, ()),
    "the store does not answer": (host, dict(before=down), ("unavailable",)),
    "it dies while it is read": (host, dict(during=down), ("unavailable",)),
    "a put was lost": (losing, {}, ()),
    "a page is evicted after the look-up": (host, dict(during=evict), ("missing",)),
    "three pages come, then nothing": (host, dict(comes=3), ("late",)),
    "a bit flips on the way": (host, dict(during=noise), ("corrupt",)),
    "a bit flips in a file": (disk, dict(before=rot), ("corrupt",)),
    "a file is cut": (disk, dict(during=cut), ("truncated",)),
    "another page's file in its place": (disk, dict(during=swap), ("foreign",)),
    "the disk is emptied while it is read": (disk, dict(during=wipe), ("missing",)),
}

# %%
drill_folder = tempfile.TemporaryDirectory()


def go_through(store, **broken):
    return drill(engine, space, example, example_expected, store, stored=STORED, page=BROKEN, **broken)


outcomes = {name: go_through(store(), **broken) for name, (store, broken, _) in FAULTS.items()}
print(f"{'fault':<38} {'reused':>6} {'run again':>10} {'computed':>9}   {'reason counted':<15} bits")
for name, found in outcomes.items():
    reasons = ", ".join(found.reasons) or ("-" if found.reused == STORED else "(not found)")
    bits = "of a cold run" if found.equal else "OTHERS"
    print(f"{name:<38} {found.reused:>6} {found.replayed:>10} {found.computed:>9}   {reasons:<15} {bits}")

# %% [markdown]
# Most faults cost the fourth page and what follows: without a gap there are 48 tokens. From the boundary state after 32 the
# request runs 16 tokens again. Where even that does not come any more (the store is dead, the deadline is over, the disk is
# empty) it replays the 21 tokens that make the state anew. A store that is down from the start costs everything, and that
# is all that it costs. A lost put has no reason: to the request it is a page that nobody ever stored.
#
# Would the comparison notice anything at all? The **negative control**: nobody verifies, neither the store nor the mover.
# The label of the page is still right, so it is used.

# %%
CONTROLS = {
    "a bit flips on the way": lambda verify: go_through(host(verify=False), during=noise, verify=verify),
    "a bit flips in a file": lambda verify: go_through(disk(verify=False), before=rot, verify=verify),
}
unverified = {name: control(False) for name, control in CONTROLS.items()}
by_mover_alone = {name: control(True) for name, control in CONTROLS.items()}
for name, found in unverified.items():
    print(f"{name}, not verified: {found.reused} tokens reused, reasons: {found.reasons or 'none'}, ", end="")
    print("the bits of a cold run" if found.equal else f"other logits, by up to {found.logit_error:.1g}")
for name, found in by_mover_alone.items():
    print(
        f"{name}, verified by the mover alone: {', '.join(found.reasons)}, the bits of a cold run: {found.equal}"
    )
drill_folder.cleanup()

# %% [markdown]
# One bit of 640 bytes, and the answer is another one; no error, no warning. That is what an engine serves that does not
# verify what it reloads.
#
# ## What was shown

# %%
# What was stored of a prompt came down whole, and went when its namespace was forgotten.
assert kinds == {"page": [16, 32, 48, 64, 80, 96], "tail": [101], "boundary": [101]} and left_of_it == 0

# Every token of every prompt was counted once, and every answer has the bits of a cold run.
for found in runs.values():
    assert found.tokens == total and found.requests == len(prompts)
    assert found.equal == len(prompts)
    assert found.sources["computed"] >= len(prompts)  # at least the last token of each
    assert (found.hits == 0) == (found.reused == 0)

# Tokens found and requests found differ. Less room, fewer tokens found; tiers that hold everything find what a large device finds.
assert any(found.hits / found.requests != found.reused / found.tokens for found in runs.values())
reused = {name: found.reused for name, found in runs.items()}
assert reused["device 160 pages"] >= reused["device 80 pages"] >= reused["device 40 pages"]
assert reused["device 40, host 256 kB"] >= reused["device 40, host 128 kB"] >= reused["device 40, host 64 kB"]
assert reused["device 40, host 64 kB, disk without limit"] >= reused["device 40, host 64 kB, disk 128 kB"]
if len(different) <= PAGES:
    assert reused["device 40, host 64 kB, disk without limit"] == reused["device 160 pages"]
    assert (
        runs["device 40, host 64 kB, disk without limit"].sources["computed"]
        == runs["device 160 pages"].sources["computed"]
    )

# As far as was measured: reloads grow more slowly than computing, and at the longest prompt all are faster than it.
assert all(seconds[-1] / seconds[0] < computing[-1] / computing[0] for seconds in reloads.values())
assert all(seconds[-1] < computing[-1] for seconds in reloads.values())

# V4-Flash: the break-even bandwidth falls with the length, to that of a token alone: some 40 MB/s.
bandwidths = [bandwidth for bandwidth, _, _ in flash_rows]
assert bandwidths == sorted(bandwidths, reverse=True) and bandwidths[-1] > token_bandwidth
assert 40e6 < token_bandwidth < 41e6 and 44e6 < bandwidths[3] < 46e6
# At 1 GB/s even the shortest prompt is there before it would be computed: what is left is for fixed costs.
assert all(wire < seconds for _, seconds, wire in flash_rows)

# Every fault: the reason that was to be expected, and the bits of a cold run.
for name, (_, _, reasons) in FAULTS.items():
    assert outcomes[name].equal and outcomes[name].logit_error == 0, name
    assert outcomes[name].reasons == reasons, name
    assert outcomes[name].reused + outcomes[name].replayed + outcomes[name].computed == len(example), name
    assert (outcomes[name].reused == STORED) == (name == "none"), name

# And without verification the same faults give other answers, and say nothing.
for name, found in unverified.items():
    assert not found.equal and found.logit_error > 0 and found.reused == STORED and not found.reasons, name
    assert by_mover_alone[name].equal and by_mover_alone[name].reasons == ("corrupt",), name
print("all hold")
