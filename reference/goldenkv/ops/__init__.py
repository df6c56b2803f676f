"""The mathematics: pure functions, arrays in and arrays out. Nothing here knows a configuration or a cache.

One axis legend for annotations and einsums:

=====  ==========================================================
t      tokens (queries of a tile or of a sequence)
h      heads of core attention, or of the indexer
d      channels of a head, of a KV row, of an index key
c      channels of a compressor row: 2 d for CSA, d for HCA
n      keys: window rows, entries, blocks
k      chosen ones: selected entries, chosen experts
m      tokens of a block (the compression ratio)
i, o   input and output channels of a projection
g, r   groups of heads, channels of a group's projection
e, f   experts, intermediate channels of an expert
s      residual streams
v      vocabulary
=====  ==========================================================
"""

from . import attend, compress, index, linear, mhc, moe, norm, quant, rope

__all__ = ["attend", "compress", "index", "linear", "mhc", "moe", "norm", "quant", "rope"]
