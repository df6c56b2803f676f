"""Parity with other implementations: the published inference code (golden files) and transformers.

These are comparisons with a tolerance, of two programs that order their sums differently. Bit equality is
claimed only between runs of this project and tested elsewhere.
"""

from .golden import QUANTISED_MEAN, compare_golden, golden_report, golden_state
from .report import ParityReport, ParityRow, compare_arrays, render
from .transformers import (
    compare_transformers,
    transformers_configs,
    transformers_logits,
    transformers_model,
    transformers_report,
)

__all__ = [
    "QUANTISED_MEAN",
    "ParityReport",
    "ParityRow",
    "compare_arrays",
    "compare_golden",
    "compare_transformers",
    "golden_report",
    "golden_state",
    "render",
    "transformers_configs",
    "transformers_logits",
    "transformers_model",
    "transformers_report",
]
