"""What tiers are worth, and what becomes of a request when they break: the measurements of a notebook."""

from .crossover import crossover
from .drill import Outcome, drill
from .runs import Cold, Inline, Served, cold, serve
from .sessions import growing, interleaved, read_sessions

__all__ = [
    "Cold",
    "Inline",
    "Outcome",
    "Served",
    "cold",
    "crossover",
    "drill",
    "growing",
    "interleaved",
    "read_sessions",
    "serve",
]
