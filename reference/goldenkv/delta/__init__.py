"""Delta encoding of rows: I, P and B frames, lossless and with a bounded error.

`frames` says which row is predicted from which, `stream` how the frames lie in a stream, `entropy` what makes
them shorter. `lossless` codes differences of bits, `bounded` quantised differences of values, `fields` the
parts of a packed row each in its own way.
"""

from .bounded import BoundedCodec
from .codec import Codec, CodecError, DamagedStream, ForeignStream, Touched, TruncatedStream, UnsupportedRows
from .entropy import Range, Zstd
from .fields import FieldCodec
from .frames import Frames
from .lossless import DeltaCodec

__all__ = [
    "BoundedCodec",
    "Codec",
    "CodecError",
    "DamagedStream",
    "DeltaCodec",
    "FieldCodec",
    "ForeignStream",
    "Frames",
    "Range",
    "Touched",
    "TruncatedStream",
    "UnsupportedRows",
    "Zstd",
]
