"""Pallas GPU kernels for goldenkv, each with the signature of an op of `goldenkv.ops`.

There is none yet. The reference never imports this package; the tests import both and compare.
"""

__version__ = "0.1.0"
