"""The control of tile invariance: the same model, computed in shapes that follow the request."""

from __future__ import annotations

from ..config import Numerics
from .engine import Engine


class FreeShapeEngine(Engine):
    """Runs every chunk as one program of the chunk's own length, started where the chunk starts.

    This is what engines do that batch by shape. Everything else is the same code, yet a token's bits then
    depend on how the prompt was cut. It exists to be compared against `Engine` in controls; every new chunk
    length compiles.
    """

    aligned = False
    largest_chunk = 128
    """Longer chunks are cut into pieces of this many tokens."""

    @staticmethod
    def _largest_tile(numerics: Numerics) -> int:
        return FreeShapeEngine.largest_chunk

    def _tile_at(self, length: int, remaining: int) -> tuple[int, int]:
        return length, min(remaining, self.largest_chunk)
