# %% [markdown]
# # Kernels and rooflines
#
# How fast could the attention of V4-Flash be on a GPU? And what can be known about GPU kernels on a machine that has
# none?
#
# `goldenkv_kernels` has five kinds of kernels, for the parts of a layer that touch the KV state:
#
# | | kernel | does |
# |---|---|---|
# | a | sparse attention (CSA) | gathers 512 selected entries and the window, one softmax |
# | b | indexer | scores all entries of a sequence, selects the best 512 |
# | c | compressor | pools 4 or 128 tokens into an entry |
# | d | dense attention (HCA) | reads all entries and the window, one softmax |
# | e | pages | gathers, scatters, packs and unpacks pages for offload |
#
# This notebook first calculates a **floor** for each: the least time that it can take on an H200, whoever writes it.
# Then it looks at what the compiler says of ours. Then at the gates that check them without a GPU, and at what each
# gate cannot see. Last, at what was measured.
#
# **Nothing here is a measured speed**, unless section 6 says so.

# %%
import jax

from goldenkv.config import flash
from goldenkv_kernels import figures
from goldenkv_kernels.gates import points, roofline
from goldenkv_kernels.gates.cases import CASES
from goldenkv_kernels.gates.controls import CONTROLS
from goldenkv_kernels.gates.h200 import PROCESSORS
from goldenkv_kernels.gates.measured import read_measured
from goldenkv_kernels.gates.occupancy import held, programs
from goldenkv_kernels.gates.run import MEASURED, TABLE, Row, check
from goldenkv_kernels.gates.table import problems_alone, read_table

# %% [markdown]
# ## 1. Two floors
#
# A kernel must bring its bytes from memory, and it must do its multiplications. Both take time, however well it is
# written. For an H200 we take what was measured, not the data sheet: a plain copy within the device moves
# **4.3 TB/s** (read plus written), and large BF16 matrix products reach **790 TFLOP/s**.
#
# > **floor = max(bytes / 4.3 TB/s, operations / 790 TFLOP/s)**
#
# Which of the two counts depends on one number, the **arithmetic intensity**: operations a byte. Below the
# **ridge** memory is the floor, above it the matrix units are.
#
# Bytes count every element that must be read or written, once. Operations count multiplications and additions
# of matrix products only.

# %%
ridge = roofline.OPERATIONS_A_SECOND / roofline.BYTES_A_SECOND
print(f"the ridge: {ridge:.0f} operations a byte")

work = roofline.attention(1, 512, native=False)
rows, own = (128 + 512) * 512 * 2, 64 * 512 * (2 + 4)
print("\nsparse attention in BF16, one query of one sequence, 64 heads of 512 channels:")
print(f"  128 + 512 rows of 1,024 bytes                {rows:>12,} bytes")
print(f"  the query in BF16, its result in float32     {own:>12,} bytes")
print(f"  64 heads x 640 rows x 512 channels x 2 x 2   {work.operations:>12,.0f} operations")
print(f"  {work.operations:,.0f} / {work.nbytes:,.0f} = {work.intensity:.1f} operations a byte")

# %% [markdown]
# That is a lot for decoding. In ordinary attention a key serves the few query heads that share it, say 1 to 16. In
# V4 **all 64 heads share one row**, which is key and value at once. So a row that was read is used 64 x 2 times.
#
# ## 2. Where each kernel stands
#
# The same for all kernels, for contexts of 4,096 to 262,144 tokens. FP8 is the native row of 584 bytes
# (`03_how_many_bytes`). The indexer reads BF16 keys.

# %%
CONTEXTS = (4096, 16384, 65536, 262144)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CSA, HCA, TOP_K = roofline.CSA, roofline.HCA, roofline.SELECTED
PAGE_TOKENS = points.ROWS * CSA

KERNELS = {
    "sparse attention, BF16": lambda b, n: roofline.attention(b, min(TOP_K, n // CSA), native=False),
    "sparse attention, FP8": lambda b, n: roofline.attention(b, min(TOP_K, n // CSA), native=True),
    "dense attention, BF16": lambda b, n: roofline.attention(b, n // HCA, native=False),
    "dense attention, FP8": lambda b, n: roofline.attention(b, n // HCA, native=True),
    "index scores": lambda b, n: roofline.index_scores(b, n // CSA),
    "select": lambda b, n: roofline.select(b, n // CSA),
    "compressor, CSA": lambda b, n: roofline.compress(b * n, CSA, 512, overlap=True),
    "compressor, HCA": lambda b, n: roofline.compress(b * n, HCA, 512, overlap=False),
    "page moves": lambda b, n: roofline.move(b * n // PAGE_TOKENS, points.LAYOUT.nbytes),
    "packing": lambda b, n: roofline.pack(b * n // CSA),
}
works = {name: {(b, n): make(b, n) for b in BATCHES for n in CONTEXTS} for name, make in KERNELS.items()}

measured = read_measured(MEASURED)
figure = figures.roofline_figure(
    {name: {f"{n // 1024}k": found[1, n] for n in CONTEXTS} for name, found in works.items()},
    measured.points if measured else (),
)

# %% [markdown]
# - **Sparse attention does not care about the context.** It reads 512 entries, at 4k as at 256k: all its dots
#   lie on each other.
# - **FP8 moves a kernel to the right**: the same operations, on fewer bytes. Dense attention over FP8 rows is the only
#   kernel that gets to the ridge, at the longest context.
# - **The indexer** stands at 63: 64 heads, like attention, but a key is used once only and not again as a value.
# - **Compressor, page moves and packing** have no matrix products. For them speed is bytes.
#
# And the batch? One would expect it to help: with more sequences, more operations. But each sequence has its *own*
# entries. Twice the sequences are twice the bytes too:

# %%
print(f"{'operations a byte':<24}" + "".join(f"{f'batch {b}':>10}" for b in (1, 8, 64)) + f"{'bound by':>14}")
for name, found in works.items():
    row = "".join(f"{found[b, 65536].intensity:>10.1f}" for b in (1, 8, 64))
    print(f"{name:<24}{row}{found[1, 65536].bound:>14}")
print("(context 64k)")

# %% [markdown]
# This is unlike the products with *weights*, which all sequences share. There a batch helps. Attention gains nothing
# but more work to fill the GPU with (section 4).
#
# ## 3. The floors
#
# Now times. Each is a calculation from the two numbers above. Microseconds a call, batch 32:

# %%
print(f"{'microseconds':<24}" + "".join(f"{f'{n // 1024}k':>12}" for n in CONTEXTS) + f"{'MB at 64k':>12}")
for name, found in works.items():
    micros = "".join(f"{1e6 * found[32, n].seconds:>12,.2f}" for n in CONTEXTS)
    print(f"{name:<24}{micros}{found[32, 65536].nbytes / 1e6:>12,.1f}")
print("\n(compressor, page moves and packing: for all tokens of the contexts, as after a prefill)")

# %%
DECODE = [*list(KERNELS)[:4], "select"]  # which scores too
figure = figures.floors_figure(
    {
        "batch 32": (
            "tokens of context",
            {name: {n: works[name][32, n] for n in CONTEXTS} for name in DECODE},
        ),
        "context 256k": (
            "sequences in the batch",
            {name: {b: works[name][b, 262144] for b in BATCHES} for name in DECODE},
        ),
    }
)

# %% [markdown]
# At long contexts the indexer is what costs. It reads *every* entry to choose 512. Added up over the layers of
# Flash, for one token each of 32 sequences:

# %%
kinds = [flash().kind(layer).name for layer in flash().layers]
csa_layers, hca_layers = kinds.count("CSA"), kinds.count("HCA")
step = {}
print(
    f"{csa_layers} CSA and {hca_layers} HCA layers, FP8 rows; microseconds at least, a decode step of 32 sequences\n"
)
print(f"{'context':>8} {'select':>10} {'sparse':>10} {'dense':>10} {'sum':>10}   the indexer's share")
for n in CONTEXTS:
    parts = (
        csa_layers * works["select"][32, n].seconds,
        csa_layers * works["sparse attention, FP8"][32, n].seconds,
        hca_layers * works["dense attention, FP8"][32, n].seconds,
    )
    step[n] = parts[0] / sum(parts)
    cells = "".join(f"{1e6 * part:>11,.0f}" for part in (*parts, sum(parts)))
    print(f"{f'{n // 1024}k':>8}{cells}   {step[n]:.0%}")

# %% [markdown]
# (With keys in BF16. FP8 or FP4 keys, which published engines keep, divide the bytes of the indexer by nearly 2 or 4.) So
# whoever wants to be fast at 256k tokens should look at the indexer first, not at attention.
#
# ## 4. What the compiler says
#
# Every kernel is compiled for an H200 that is not there, and NVIDIA's assembler says what it takes: **registers** of
# a thread (255 at most), **spills** (numbers that found no register and go to memory), **shared memory**. The
# numbers are committed in `kernels/table.json`. A kernel that spills, or grows beyond them, fails.
#
# From these follows how many **programs** (thread blocks) one of the 132 processors holds at a time. More of
# them hide the latency of memory better.

# %%
table = read_table(TABLE)
kernels = {
    f"{case.replace(': ', ', ')}: {kernel.name}": kernel
    for case, found in table.cases.items()
    for kernel in found
}
print(f"compiled for sm_90a by jax {table.jax} and ptxas {table.ptxas}\n")
print(
    f"{'function, case: kernel':<46} {'threads':>7} {'registers':>9} {'spills':>6} {'shared':>8} {'on a processor':>14}"
)
for name, kernel in kernels.items():
    print(
        f"{name:<46} {kernel.threads:>7} {kernel.registers:>9} {kernel.spill:>6} {kernel.shared:>8,} {held(kernel):>14}"
    )

# %%
figure = figures.budget_figure(kernels)

# %% [markdown]
# Nothing spills, but attention takes every register there is: 64 heads of 512 channels are 32,768 float32 sums, 128 for
# each of 256 threads, before anything else. (With FP8 rows only half the heads fit: decoding takes registers too.) So
# **one** program fills a processor, and only what it loads ahead of time hides latency.
#
# And here the batch comes back. A program is all heads of *one query* (half of them with FP8 rows). So one sequence
# is one program, and 131 processors have nothing to do: its floor of 0.2 microseconds is out of reach. The programs of
# each call, read from the grids of the traced kernels:

# %%
WANTED = {
    ("sparse_attention bf16", points.PALLAS): "sparse attention, BF16",
    ("sparse_attention bf16", points.SPLIT): "the same, split by 256 keys",
    ("sparse_attention fp8", points.PALLAS): "sparse attention, FP8",
    ("index_scores", points.PALLAS): "index scores",
}
started = {name: {} for name in WANTED.values()}
for batch in BATCHES:
    for point in points.points((batch,), (65536,), ()):
        for implementation in point.implementations:
            name = WANTED.get((point.name, implementation))
            if name:
                shapes = jax.eval_shape(point.split, jax.random.key(0))
                [(_, count), *_] = programs(point.loop(implementation, 1), *shapes)
                started[name][batch] = count
figure = figures.programs_figure(started)

# %% [markdown]
# The remedy is to **split the keys** of a query over several programs and add their results up in a second kernel.
# Here a rule of this project comes in: the split must not follow the batch. Another split is another order of sums,
# so a sequence would get other bits in other company (`tests/claims/`). So a split has a fixed *size*, whatever the
# batch. It is off by default; whoever decodes few sequences turns it on for all calls.
#
# ## 5. What the gates see
#
# A kernel for a machine that is not there can be wrong in ways that do not show. Four gates look at each:
#
# | gate | does | cannot see |
# |---|---|---|
# | numerics | runs the kernel in Pallas's interpret mode, and compares with float64 | reads out of bounds (interpret mode pads and clamps), races (one program runs after the other), what a GPU rounds otherwise |
# | lowering | makes the program for CUDA: finds block sizes and operations that Triton lacks | registers, results |
# | compiling | compiles it to machine code: finds spills | results, speed |
# | bounds | executes the program for the GPU address by address, with poison wherever nothing may be read | a GPU's rounding, speed, 32-bit addresses that overflow |
#
# **A gate that nothing fails proves nothing.** So there are kernels that are wrong on purpose. One of them doubles 10
# rows in blocks of 4. The last block has 2 rows too many:

# %%
by_name = {control.case.name: control for control in CONTROLS}
ragged = by_name["a ragged block"]
row = Row(ragged.case)
check(row)
off = row.numerics["pallas"]
print(f"numerics: error {off.error:g}, {'refused' if off.problem else 'let pass'}")
print(f"lowering: {row.kernels} kernel for CUDA, {'refused' if 'lowering' in row.problems else 'let pass'}")
print("bounds:   refused")
for problem in row.problems["bounds"]:
    print(f"   {problem}")

# %% [markdown]
# Interpret mode has silently padded the array, so the result is right. On a GPU it would read and overwrite whatever
# lies behind it.
#
# All that the gates of this process say, of all wrong kernels and of two sound ones:

# %%
GATES = {"numerics": "pallas", "lowering": "lowering", "bounds": "bounds"}
cheap = [control for control in CONTROLS if control.gate in GATES]
sound = {
    case.id: f"sound: {case.kernel}"
    for case in CASES
    if case.id in ("index_scores: small f32", "gather_pages: small")
}
refused = {}
for case in (*(control.case for control in cheap), *(case for case in CASES if case.id in sound)):
    row = Row(case)
    check(row)
    refused[sound.get(case.id, case.name)] = {gate: key in row.problems for gate, key in GATES.items()}
figure = figures.gates_figure(refused, {control.case.name: control.gate for control in cheap})

# %% [markdown]
# The lines in the middle are the ones to fear: right results, clean code for CUDA, and wrong on a GPU. Only the last gate
# sees them. (The gate that compiles has a control too, which spills. It needs another Python: `make kernels`.)
#
# ## 6. What was measured
#
# `python kernels/bench.py --json kernels/measured.json`, on a machine with a GPU, compares every kernel with
# float64 once more, then times it against XLA's version and the floors. If the file is there, its points are in
# the roofline above and here.

# %%
if measured is None:
    print("There is no kernels/measured.json. NO KERNEL HAS RUN ON A GPU, and no speed is known:")
    print("all times above are floors, calculated from the sizes.")
else:
    print(f"{measured.device}, jax {measured.jax}\n")
    for point in measured.points:
        about = f"{point.name}, {point.size}, {point.implementation}"
        print(f"{about:<72} {1e6 * point.seconds:>10,.1f} us {point.share:>6.0%} of the floor")

# %% [markdown]
# ## What was shown

# %%
# Intensity: no batch changes it; below the ridge memory is the floor, above it the matrix units.
for name, found in works.items():
    for n in CONTEXTS:
        assert len({round(found[b, n].intensity, 9) for b in BATCHES}) == 1, name
        assert found[64, n].nbytes == 64 * found[1, n].nbytes
        assert (found[1, n].bound == "operations") == (found[1, n].intensity > ridge)
assert (work.nbytes, work.operations) == (rows + own, 64 * 640 * 512 * 2 * 2)
bound = {(name, n) for name, found in works.items() for n in CONTEXTS if found[1, n].bound == "operations"}
assert bound == {("dense attention, FP8", 262144)}
assert len({works["sparse attention, FP8"][1, n].intensity for n in CONTEXTS}) == 1
assert all(not works[name][1, 4096].operations for name in list(KERNELS)[6:])

# The indexer's share grows with the context, from a small part to most of it.
assert list(step.values()) == sorted(step.values()) and step[4096] < 0.35 and step[262144] > 0.85

# The table: every compiled case, nothing spills, everything fits on a processor.
assert list(table.cases) == [case.id for case in CASES if case.compiled]
assert not any(problems_alone(table, case) for case in table.cases)
assert all(held(kernel) >= 1 for kernel in kernels.values())
assert held(table.cases["sparse_attention: flash bf16"][0]) == 1

# One sequence: a floor of 0.2 microseconds, for one program.
assert round(1e6 * works["sparse attention, BF16"][1, 65536].seconds, 1) == 0.2

# Programs: one a sequence, and three if keys are split; 64 sequences leave processors idle without a split.
assert started["sparse attention, BF16"] == {b: b for b in BATCHES}
assert started["the same, split by 256 keys"] == {b: 3 * b for b in BATCHES}
assert started["sparse attention, BF16"][64] < PROCESSORS < started["the same, split by 256 keys"][64]

# Each wrong kernel is refused by its gate. Those against which only bounds helps pass the others; sound ones pass all.
assert all(refused[control.case.name][control.gate] for control in cheap)
for control in cheap:
    if control.gate == "bounds":
        assert refused[control.case.name] == {"numerics": False, "lowering": False, "bounds": True}
assert len(sound) == 2 and not any(any(refused[name].values()) for name in sound.values())

# Measured points, if there are any, are of the GPU that the floors are of.
assert measured is None or "H200" in measured.device
print("all hold")
