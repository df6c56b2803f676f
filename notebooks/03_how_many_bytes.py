# %% [markdown]
# # How many bytes a token
#
# DeepSeek-V4 keeps far less state than its predecessors. How much less decides what an engine can do with it:
# how many requests fit, what a page should hold, what it costs to move a request to another machine.
#
# So the number must be right. An article on scheduling KV caches gives **6.3 bytes a token** for V4-Flash. This
# notebook builds the number up from a single row, checks it on real arrays, and finds 3,514. Then it looks at
# what changes when the number is corrected. At the end it asks what even fewer bytes would cost: FP8 against
# INT4.
#
# If CSA, HCA and the window are new to you, read `01_attention_from_scratch` first. Units: **kB** and **MB** are
# 1,000 and 1,000,000 bytes; **KiB** and **MiB** are 1,024 and 1,048,576.

# %%
import codecs
import this
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from goldenkv import figures, precision
from goldenkv.capacity import Load, Report, allocate, page_table, pool_rows, read_model
from goldenkv.config import bench, flash
from goldenkv.engine import Engine
from goldenkv.figures import decimal_size as size
from goldenkv.model.weights import Model
from goldenkv.ops import quant
from goldenkv.state import (
    NotRepresentable,
    PageLayout,
    cells,
    compare,
    pack,
    pack_page,
    page_layout,
    read_page,
    row_format,
    unpack,
)
from goldenkv.state.packing import from_bytes
from goldenkv.text import byte_tokens

# %% [markdown]
# We use a small model with random weights whose *rows* have the published width: 512 channels, the last 64 of
# them rotated by RoPE. Its index keys have 128 channels, as published. The text is the one that `import this`
# prints; a byte is a token.

# %%
config = replace(bench(), head_dim=512, qk_rope_head_dim=64, index_head_dim=128)
text = byte_tokens(codecs.decode(this.s, "rot13"), config.vocab_size)
CSA, HCA, LENGTH = 2, 3, 768

engine = Engine(Model(config, seed=0), config, max_length=1024)
sequence = engine.open()
logits = engine.prefill(sequence, text[:LENGTH], all_logits=True)
run = engine.snapshot(sequence)
engine.close(sequence)

print("layers:", ", ".join(f"{layer} {config.kind(layer).name}" for layer in config.layers))
print(f"what grew with the {LENGTH} tokens:")
for cell in cells(config):
    if cell.component.paged:
        print(
            f"  {cell.name:<19} {len(run.rows[cell.name]):>3} rows of {run.rows[cell.name].shape[1]} channels"
        )

# %% [markdown]
# ## 1. A row: 584 bytes
#
# A row in BF16 would take 512 x 2 = 1,024 bytes. V4 stores it in **FP8**: a byte for each channel that is not
# rotated. FP8 (E4M3) has few digits and ends at 448. So every 64 channels share a **scale**: a power of two that
# brings the largest of them into this range. The rotated channels stay in BF16.
#
# The published code rounds every row to what FP8 can hold as soon as it is made ("fake quantisation"). Our run
# kept float32. So we round now, with the same function that the model itself would use. Then the row must fit
# into the format without any further loss. `pack` refuses a row that does not.

# %%
native = row_format("fp8", config.head_dim, config.qk_rope_head_dim)
PLAIN = config.head_dim - config.qk_rope_head_dim

made = run.rows[f"layers.{CSA}.entries"]
plain, rotated = made[:, :PLAIN], made[:, PLAIN:]
entries = np.concatenate(
    [quant.fake_quantise_e4m3(jnp.asarray(plain)), rotated.astype(ml_dtypes.bfloat16)], axis=1
)

packed = pack(entries, native)
fields = from_bytes(packed, native)
print(f"{len(entries)} entries packed: {packed.shape[0]} rows of {packed.shape[1]} bytes\n")
print(f"{'field':<9} {'type':<15} {'count':>5} {'bytes':>5}  entry 40")
for field in native.fields:
    first = [f"{value:g}" for value in fields[field.name][40, :4].astype(np.float32)]
    more = " ..." if field.count > 4 else ""
    print(f"{field.name:<9} {field.dtype:<15} {field.count:>5} {field.nbytes:>5}  {'  '.join(first)}{more}")
print(f"{'':<31} {native.nbytes:>5}")

value, scale = (fields[name][40, 0].astype(np.float32) for name in ("values", "scales"))
print(f"\nthe first channel: {value:g} x {scale:g} = {value * scale:g}")
print(f"in the rounded entry {entries[40, 0]:g}, as the model made it {made[40, 0]:g}")

# %% [markdown]
# UE8M0 is a byte that holds nothing but the exponent of a power of two. There are 448 / 64 = 7 scales, and one
# byte of padding makes them 8.
#
# Now back: unpack the bytes and compare *bits*. And a control: the entries as the model made them do not lie on
# the grid of FP8. They are refused, not rounded in silence.

# %%
row_same = compare({"entries": entries}, {"entries": unpack(packed, native)}).same
print("packed and unpacked, the same bits:", row_same)
try:
    pack(made, native)
    refused = False
except NotRepresentable as error:
    refused = True
    print("without rounding first, refused:", str(error).split(":")[0])

# %% [markdown]
# Other rows in the same picture. The index keys of CSA are much smaller: they only choose entries. V3.2 has
# rows of its own, one of each kind for every token.

# %%
formats = {
    "V4 row, BF16": row_format("bfloat16", 512, 64),
    "V4 row, FP8": native,
    "V4 index key, FP8": row_format("index_fp8", 128),
    "V4 index key, FP4": row_format("index_fp4", 128),
    "V3.2 row, FP8": row_format("fp8_v32", 576, 64),
    "V3.2 index key, FP8": row_format("index_fp8", 128),
}
figure = figures.row_figure(formats)

# %% [markdown]
# ## 2. A page of rows
#
# Engines keep rows in **pages**. A page of 256 tokens has 64 CSA entries in every CSA layer. Within a page the
# scales do not stand beside their rows: first come the data of all rows, 576 bytes each, then the 8 bytes of
# scales of all rows. Then the page is padded to a multiple of 576.

# %%
layout = page_layout("fp8", 64, config.head_dim, config.qk_rope_head_dim)
page = pack_page(entries[:64], layout)
print(
    f"64 rows x {native.nbytes} = {64 * native.nbytes:,} bytes; the page: {len(page):,} = {len(page) // 576} x 576"
)
figure = figures.page_figure(layout)

# %% [markdown]
# Reading it back gives the same bits. A reader that expects each row's scales beside the row reads garbage,
# without any error: nothing in the bytes says how they are meant. This is why a layout must be written down.

# %%
back = read_page(page, layout="fp8", rows=64, channels=512, rope=64)
page_check = compare({"rows": entries[:64]}, back)
one_by_one = PageLayout(native, 64, layout.parts, scales_last=False, alignment=576)
wrong_check = compare({"rows": entries[:64]}, read_page(page, one_by_one))
print(f"rows read right:                    {page_check.equal} of {page_check.rows}")
print(f"by a reader with the wrong layout:  {wrong_check.equal} of {wrong_check.rows}")

# %% [markdown]
# ## 3. From rows to bytes a token
#
# A layer makes one row for every so many tokens. So a token costs, in the mean over a long text:
#
# **bytes a token = sum over layers of (bytes of a row / tokens a row)**
#
# | | a row for | rows |
# |---|---|---|
# | CSA layer | 4 tokens | an entry of 584 bytes, and an index key of 68 (FP4) or 132 (FP8) |
# | HCA layer | 128 tokens | an entry of 584 bytes |
# | window | every token | but only 128 of them are kept: nothing grows |
# | V3.2, every layer | 1 token | a row of 656 bytes and an index key of 132 |
#
# The calculator reads the published configurations and adds up. `goldenkv bytes flash pro v3.2` prints the same
# and more.

# %%
v32, v4_flash, v4_pro = (read_model(name) for name in ("v3.2", "flash", "pro"))
for model in (v32, v4_flash, v4_pro):
    print(f"{model.name}, {model.layers} layers")
    for group, part in model.parts():
        if part.grows:
            each = part.bytes_a_token()
            formula = f"{group.layers} {group.kind} x {part.row.nbytes} / {part.tokens_a_row}"
            print(f"   {part.name:<11} {formula:<19} = {group.layers * each:>9,.2f}")
    print(f"   {'bytes a token':<31}   {model.bytes_a_token():>9,.2f}")

# %% [markdown]
# Besides, a sequence holds a **fixed part**, however long it is: the windows of all layers, and the compressors' raw
# rows. In the second picture it is dotted. The draft layer (MTP) is left out, as in published totals.

# %%
report = Report((v32, v4_flash, v4_pro), Load(context=3200, requests=100))
figure = figures.capacity_figure(report)

# %% [markdown]
# Flash needs 7.31% of V3.2, Pro 10.47%. The V4 report says 7% and 10%, so the formats on both sides are right.
#
# The third picture is about pages; we come to it in section 6.
#
# ## 4. Count real arrays
#
# A formula can leave something out. So we make the arrays and let NumPy count. Three times:
#
# - what grew in the run of the small model above, packed into bytes;
# - everything that an engine holds for one sequence of 3,200 tokens in **the published Flash**, allocated;
# - the same sequence in this project's own pool, which keeps BF16 rows.

# %%
TOKENS, PAGE = 3200, 128
form_of = {"entries": native, "index_keys": row_format("index_fp4", config.index_head_dim)}
run_bytes = sum(
    pack(run.rows[cell.name], form_of[cell.component.name], quantise=True).nbytes
    for cell in cells(config)
    if cell.component.paged
)

published = flash()
arrays = allocate(published, "fp8+fp4", TOKENS, PAGE)
own = pool_rows(published, "bfloat16", TOKENS, PAGE)
main = [cell for cell in cells(published) if cell.layer in published.layers]  # without the draft layer


def count(found, paged):
    return sum(found[c.name].nbytes for c in main if c.component.paged == paged and c.name in found)


flash_pages = next(p for p in page_table(v4_flash, TOKENS, 0) if p.tokens == PAGE)
counted = [
    (f"the small model's run, {LENGTH} tokens", run_bytes, read_model(config).growing_bytes(LENGTH)),
    (f"Flash, {TOKENS} tokens, pages of {PAGE}", count(arrays, True), TOKENS // PAGE * flash_pages.nbytes),
    ("Flash, the fixed part", count(arrays, False), v4_flash.bounded_bytes(TOKENS)),
    ("Flash in our pool, all BF16", count(own, True), read_model("flash", "bf16").growing_bytes(TOKENS)),
]
print(f"{'':<42} {'counted':>11} {'calculated':>11}")
for name, found, expected in counted:
    print(f"{name:<42} {found:>11,} {expected:>11,}")
padding = count(arrays, True) - v4_flash.growing_bytes(TOKENS)
print(
    f"\nof the pages of Flash, padding: {padding:,} ({padding / v4_flash.growing_bytes(TOKENS):.2%} of the rows)"
)

# %% [markdown]
# ## 5. Where do 6.3 bytes come from?
#
# The article is called "KV Cache Scheduling Engineering: After Compression to 7%" (2026). It does not derive its
# numbers. But it gives several, and they fit together. From its sizes of a 16-token block (1.4 KB, 101 bytes,
# 144 bytes) we get its bytes a token. Beside them is what the formula gives.

# %%
article_token = {"v3.2": 1400 / 16, "flash": 6.3, "pro": 144 / 16}
print(f"{'':<6} {'article':>12} {'FP8 + FP4 keys':>15} {'BF16 + FP8 keys':>16} {'all BF16':>13}")
for name, theirs in article_token.items():
    token = [read_model(name, form).bytes_a_token() for form in (None, "bf16+fp8", "bf16")]
    print(
        f"{name:<6} {theirs:>8.1f} B   {token[0]:>12,.0f} B {token[1] / 1e3:>13.2f} kB {token[2] / 1e3:>10.2f} kB"
    )

too_small = v4_flash.bytes_a_token() / article_token["flash"]
print(f"\nFlash, FP8: {v4_flash.bytes_a_token():,.2f} / 6.3 = {too_small:.0f}")
print(f"7% of V3.2's {v32.bytes_a_token():,.0f} bytes: {0.07 * v32.bytes_a_token():,.0f} bytes")

# %% [markdown]
# (V3.2 keeps its index keys in FP8, so its first column is "FP8 + FP8 keys".)
#
# Read the article's column in **kilobytes** and all three numbers fit, to about 10%: they are the sizes of BF16
# rows. (And 6.3 and 9 are 7% and 10% of 90.) So it seems that a KB or KiB was read as a byte, and BF16 as FP8. Together:
# a factor of about 560.
#
# This is our guess, but the same slip can be seen within the article. For V3 its text has 31 KB a token. Its
# table of 16-token blocks has 496 bytes for V3. That is 31 *bytes* a token.

# %%
print(f"V3, in the article: 31 KB a token; a block of 16 tokens: 496 bytes = 16 x {496 / 16:.0f} bytes")
print(f"V3, the formula:    {read_model('v3', 'fp8').bytes_a_token() / 1e3:.1f} kB a token in FP8")

# %% [markdown]
# ## 6. What changes
#
# Everything that was computed from 6.3 bytes changes. We take the article's own case: **100 requests of 3,200
# tokens**.
#
# A second correction: pages are not all. Whoever stores a request, or moves it, also needs the state at its
# end: the windows and, in CSA layers, the overlap (see `02_reload_gate`). Here it is called the **snapshot**. At a
# multiple of 128 tokens, such as 3,200, it is smallest.

# %%
[snapshot] = report.snapshots(v4_flash)
page_256 = next(p for p in report.pages(v4_flash) if p.tokens == 256)
growing, MILLION = v4_flash.growing_bytes, 1_000_000

# what: (the article's bytes, bytes of pages, bytes of snapshots)
claims = {
    "a token": (6.3, v4_flash.bytes_a_token(), 0),
    "a page of 256 tokens": (1.6e3, page_256.nbytes, 0),
    "a shared prefix, 1,500 tokens": (9.5e3, growing(1500), 0),
    "a request, 3,200 tokens": (20.2e3, snapshot.pages, snapshot.nbytes),
    "100 requests, 3,200 tokens": (2.02e6, 100 * snapshot.pages, 100 * snapshot.nbytes),
    "a request, 1M tokens": (6.3e6, growing(MILLION), snapshot.nbytes),
    "100 requests, 1M tokens": (630e6, 100 * growing(MILLION), 100 * snapshot.nbytes),
}
print(f"{'':<30} {'article':>9} {'pages':>9} {'snapshot':>10}")
for what, (theirs, pages, state) in claims.items():
    print(f"{what:<30} {size(theirs):>9} {size(pages):>9} {'+ ' + size(state) if state else '':>10}")

# %%
figure = figures.claims_figure(
    {what: (theirs, sum(ours)) for what, (theirs, *ours) in claims.items()}, "article"
)

# %% [markdown]
# ### The page size
#
# Each page needs **metadata**: a key, a place. The article takes up to 24 bytes. Next to a block of 101 bytes that would be
# a lot, and it asks for large pages because of it. Next to the right block it is nothing:

# %%
METADATA = 24
sizes = page_table(v4_flash, TOKENS, METADATA)
print(
    f"{'tokens':>6}   {'article: bytes':>14} {'metadata':>9}   {'counted: bytes':>14} {'metadata':>9} {'padding':>8}"
)
for page_size in sizes[:6]:
    theirs = 6.3 * page_size.tokens
    print(
        f"{page_size.tokens:>6}   {theirs:>14,.0f} {METADATA / theirs:>9.1%}"
        f"   {page_size.nbytes:>14,} {page_size.metadata:>9.4%} {page_size.padding:>8.2%}"
    )
apart = {p.tokens: p.apart for p in sizes if p.apart}
print(f"\npages of {', '.join(map(str, apart))} tokens: HCA entries need pages of their own, of 128 tokens")

# %% [markdown]
# (Bytes of pages smaller than 128 tokens are those of the CSA layers.) Metadata is no reason. Two others are:
#
# - **An HCA entry stands for 128 tokens.** A smaller page holds a piece of an entry, and there are no pieces.
# - **Padding.** Each layer's part of a page is padded to a multiple of 576 bytes. A page of 16 tokens has 4 CSA entries:
#   2,336 bytes become 2,880. A page of 128 tokens has one HCA entry: 584 bytes become 1,152.
#
# So 256 tokens, which the article recommends, is a fine choice. For another reason.
#
# ### Handing a request over
#
# In a **P/D** deployment one machine computes the prompt (prefill) and another writes the answer (decode). The
# state must move between them. This is arithmetic, bytes over bandwidth: no latency, nothing else on the wire.
# The article calculates with 10 GB/s for a "10G" network; 10 Gbit/s are 1.25 GB/s.

# %%
moved = snapshot.pages + snapshot.nbytes
bandwidths = {"64 GB/s (PCIe 5)": 64e9, "10 GB/s": 10e9, "1.25 GB/s (10 Gbit/s)": 1.25e9}
article_moved = claims["a request, 3,200 tokens"][0]
print(f"one request: {snapshot.pages:,} + {snapshot.nbytes:,} = {moved:,} bytes\n")
print(f"{'milliseconds':<22} {'1 request':>21} {'100 requests':>21}")
print(f"{'':<22} {'article':>11} {'right':>9} {'article':>11} {'right':>9}")
for name, speed in bandwidths.items():
    theirs, ours = 1e3 * article_moved / speed, 1e3 * moved / speed
    print(f"{name:<22} {theirs:>11.4f} {ours:>9.2f} {100 * theirs:>11.2f} {100 * ours:>9.1f}")

PREFILL = 2 * 13e9 * TOKENS / 16e15  # seconds, with the article's 13B active parameters and 16 PFLOP/s
print(f"\nprefill of one request on the article's 8 GPUs at their peak: {1e3 * PREFILL:.1f} ms")

# %% [markdown]
# "Nearly free" is no longer true everywhere. Over PCIe the hand-over is short against the prefill. Over a
# 10 Gbit/s network it takes longer than the prefill itself would take at peak speed.
#
# ### What stands, and what falls

# %%
BUDGET = 640e9 - 284e9  # the article's 8 GPUs, less the weights
stored = {
    "3,200 tokens": 100 * moved,
    "3,200 tokens, running": 100 * (growing(TOKENS) + v4_flash.bounded_bytes(TOKENS)),
    "3,200 tokens, V3.2": 100 * v32.growing_bytes(TOKENS),
    "1M tokens": 100 * (growing(MILLION) + snapshot.nbytes),
    "1M tokens, V3.2": 100 * v32.growing_bytes(MILLION),
}
print(f"{'100 requests of':<22} {'bytes':>9}   of {size(BUDGET)}")
for what, nbytes in stored.items():
    print(f"{what:<22} {size(nbytes):>9} {nbytes / BUDGET:>10.2%}")
on_each = v4_flash.growing_bytes(TOKENS, 8)
print(f"\npages of one request of 3,200 tokens on each of 8 tensor-parallel GPUs: {size(on_each)}")

# %% [markdown]
# ("Running" counts the whole fixed part, as the published code keeps it; the other lines of Flash count snapshots.)
#
# - **Stands: V4 is small.** 7% of V3.2 is a great step, and 100 short requests take less than 1% of the memory.
# - **Stands: sharing a prefix saves prefill.** That was never about bytes.
# - **Falls: capacity is no constraint.** 100 requests of a million tokens fill the memory of the article's machine.
# - **Falls: there is nothing to offload or to compress, and transfer is free.** Gigabytes need a plan.
# - **Falls: split over 8 GPUs there is next to nothing on each.** V4 has one KV head, and one head cannot be split:
#   under tensor parallelism every GPU holds all of a request. (So the lines above need each request on one GPU only.)
#
# ## 7. Fewer bits: FP8 against INT4
#
# Would INT4 be worth it? The article says no: it would save 1 MB on the 100 requests and cost 3 to 5% of precision.
# The bytes we can now correct. What is lost we can measure.
#
# Four formats for the channels that are not rotated. **INT4** has the integers from -7 to 7 and a float32 scale
# for 32 or 64 channels. **E2M1** is a 4-bit float (FP4): 0, 0.5, 1, 1.5, 2, 3, 4, 6. First the bytes:

# %%
# Compiled, the roundings give the same bits, sooner.
FORMATS = {name: (jax.jit(round_), bits) for name, (round_, bits) in precision.FORMATS.items()}
ROTATED = native.field("rope").nbytes


def flash_token(row_bytes):
    """Bytes a token of Flash if its entries take so many bytes; index keys as they are."""
    return sum(
        group.layers * (row_bytes if part.name == "entries" else part.row.nbytes) / part.tokens_a_row
        for group, part in v4_flash.parts()
        if part.grows
    )


saved = {}
print(f"{'':<18} {'a row':>6} {'a token':>9} {'saved on 100 requests of 3,200 tokens':>39}")
for name, (_, bits) in FORMATS.items():
    row_bytes = -(-(PLAIN * bits / 8 + ROTATED) // 4) * 4  # padded to a multiple of 4
    saved[name] = 100 * TOKENS * (flash_token(native.nbytes) - flash_token(row_bytes))
    print(f"{name:<18} {row_bytes:>6.0f} {flash_token(row_bytes):>9,.0f} {size(saved[name]):>39}")

# %% [markdown]
# INT4 does not halve the bytes: rotated channels, scales and index keys stay. But it saves about 30%, and that is
# hundreds of MB where the article has 1.
#
# ### What rounding does to a value
#
# We take all rows of the run that are keys of attention, windows and entries of all layers, and round them.

# %%
keys = np.concatenate(
    [run.rows[c.name][:, :PLAIN] for c in cells(config) if c.component.name in ("window", "entries")]
)
block_peak = np.abs(keys.reshape(len(keys), -1, 64)).max(axis=-1).repeat(64, axis=-1)
relative = np.abs(keys) / block_peak
lows = 2.0 ** np.arange(-8, 0)
bins = [(relative > low) & (relative <= 2 * low) for low in lows]
outlier = np.arange(PLAIN) % 32 == 0
FACTORS = 2.0 ** np.arange(0, 19, 2)

by_size, by_outlier, zeroed = {}, {}, {}
for name, (round_, _) in FORMATS.items():
    after = np.asarray(round_(keys))
    error = np.abs(after - keys) / np.maximum(np.abs(keys), 1e-30)
    by_size[name] = (lows * 2**0.5, [float(np.median(error[inside])) for inside in bins])
    zeroed[name] = float(np.mean((after == 0) & (keys != 0)))
    beside = []
    for factor in FACTORS:
        larger = np.where(outlier, keys * np.float32(factor), keys)
        lost = (np.asarray(round_(larger)) - larger)[:, ~outlier]
        beside.append(float(np.sqrt(np.mean(lost**2) / np.mean(keys[:, ~outlier] ** 2))))
    by_outlier[name] = (FACTORS, beside)

print(f"{len(keys):,} rows, {keys.size:,} values")
for name, share in zeroed.items():
    print(f"{name}: {share:>5.1%} of the values become 0")
figure = figures.rounding_figure(by_size, by_outlier)

# %% [markdown]
# Left: FP8 is a float. It has as many digits for small values as for large ones, so its error is about 2% whatever the
# size. INT4 has equal steps: a value far below the largest of its block falls to 0, an error of 100%. FP4 has too few
# exponents to do better.
#
# Right: we multiply one channel in 32 and look at the *others*. With INT4 and FP4 the scale follows the outlier, and its
# neighbours fall to 0. FP8 does not care until the factor is in the thousands.
#
# ### What it does to the answer
#
# Now the whole model. We restore the run's state, rounded to each format, run the next 64 tokens of the text and
# compare the logits with those of the exact state. The error of rows is given in percent of the size of the rounded
# channels (root mean square over root mean square), that of logits in percent of the logits' standard deviation.

# %%
following = text[LENGTH : LENGTH + 64]
costs = precision.measure(engine, run, following, FORMATS)
spread = float(np.std(np.asarray(logits)[-64:], axis=1).mean())
print(f"{'':<18} {'bits':>6} {'error of rows':>14} {'error of logits, median':>24}")
for name, cost in costs.items():
    print(f"{name:<18} {cost.bits:>6} {cost.row_error:>14.1%} {np.median(cost.logit_error) / spread:>24.1%}")

# %%
figure = figures.precision_figure(costs, spread)

# %% [markdown]
# INT4 and FP4 lose four to five times as much as FP8, in the rows and in the logits. The smaller block of INT4 helps
# a little and costs half a bit.
#
# The **spikes** are tokens that went to another expert: a small error before the router, another choice, a large error
# for this token. (We looked at the outputs of the layers, which are not shown here. They jump only in layers with a
# learned router.)
#
# What this does **not** show:
#
# - The weights are random. The arithmetic is real, and so is the error of values that are spread like these. But a
#   trained model has *outliers*, channels much larger than the rest. The right half of the rounding picture says what
#   they would do: INT4 gets worse, FP8 does not. How large they are in V4 only a trained checkpoint can tell.
# - The article does not say what its 3 to 5% are percent of. If it means the score of a benchmark: an error of rows or
#   logits is not a score.
# - Only the stored state was rounded. Rows of the 64 new tokens are exact, and so are index keys.
#
# ## What was shown

# %%
# A row is 584 bytes, its fields say what they are, and packing loses no bit; what does not fit is refused.
assert [(f.name, f.nbytes) for f in native.fields] == [
    ("values", 448),
    ("rope", 128),
    ("scales", 7),
    ("padding", 1),
]
assert native.nbytes == 584 and packed.shape == (len(entries), 584)
assert row_same and refused and value * scale == entries[40, 0]
# A page read back has the same bits; with the wrong layout not one row is right.
assert len(page) == 65 * 576 and page_check.same and wrong_check.equal == 0

# Bytes a token, and the published shares.
assert (v32.bytes_a_token(), v4_flash.bytes_a_token(), v4_pro.bytes_a_token()) == (48068, 3514.25, 5031.4375)
assert [round(100 * report.share(m), 2) for m in (v4_flash, v4_pro)] == [7.31, 10.47]
# Real arrays have as many bytes as the formula says.
assert all(found == expected for _, found, expected in counted)

# The article's number is 558 times too small. Read as kB, all three of its numbers fit the sizes of BF16 rows.
assert round(too_small) == 558
for name, theirs in article_token.items():
    low, high = (read_model(name, form).bytes_a_token() for form in ("bf16+fp8", "bf16"))
    assert 0.88 < low / (1000 * theirs) <= high / (1000 * theirs) < 1.1, name
# What rests on it.
assert (100 * snapshot.pages, 100 * snapshot.nbytes) == (1_124_560_000, 364_441_600)
assert (page_256.nbytes, moved) == (912_192, 14_890_016)
assert all(sum(ours) / theirs > 500 for theirs, *ours in claims.values())
assert all(p.padding > 50 * p.metadata for p in sizes) and list(apart) == [16, 32, 64]
assert moved / 1.25e9 > PREFILL > moved / 10e9
assert (
    stored["3,200 tokens"]
    < stored["3,200 tokens, running"]
    < 0.01 * BUDGET
    < 0.9 * BUDGET
    < stored["1M tokens"]
)
assert on_each == snapshot.pages

# Fewer bits: more error, in rows and in logits, and outliers make it worse for all but FP8.
fp8, *others = costs
for name in others:
    assert saved[name] > 200e6
    assert costs[name].row_error > 3 * costs[fp8].row_error
    assert np.median(costs[name].logit_error) > 2 * np.median(costs[fp8].logit_error) > 0
    assert by_outlier[name][1][-1] > 3 * by_outlier[name][1][0] and zeroed[name] > 10 * zeroed[fp8]
assert max(by_size[fp8][1]) < 0.04
# FP8 holds at a factor of 2^10, and fails at 2^18.
assert by_outlier[fp8][1][5] < 1.1 * by_outlier[fp8][1][0] < 0.5 * by_outlier[fp8][1][-1]
print("all hold")
