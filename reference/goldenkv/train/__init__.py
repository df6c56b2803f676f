"""Training the small model whose state the experiments measure: text, forward pass, optimiser, baselines."""

from .corpus import Corpus, Source, read_corpus, stdlib_files, train_tokenizer
from .loop import Trainer, held_out_losses
from .recipe import Recipe
from .shapes import small, window_only

__all__ = [
    "Corpus",
    "Recipe",
    "Source",
    "Trainer",
    "held_out_losses",
    "read_corpus",
    "small",
    "stdlib_files",
    "train_tokenizer",
    "window_only",
]
