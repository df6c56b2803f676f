"""How alike neighbours are, and what that can give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def correlation(rows: np.ndarray, numbers: np.ndarray, lag: int = 1) -> float:
    """How alike rows are that lie `lag` apart: covariance over variance, summed over channels.

    Each channel is taken about its own mean, which any coder has for free. Channels count by their variance,
    so 1 - correlation is exactly half the energy of the differences.

    Args:
        rows: float [n, channels].
        numbers: [n]; pairs are rows i and j with numbers[j] = numbers[i] + lag, j = i + lag.
        lag: at least 1.

    Returns:
        NaN where there is no pair, or nothing varies.
    """
    wide = rows.astype(np.float64)
    centred = wide - wide.mean(axis=0) if len(wide) else wide
    pairs = np.flatnonzero(numbers[lag:] - numbers[:-lag] == lag)
    first, second = centred[pairs], centred[pairs + lag]
    held = (np.sum(first**2) + np.sum(second**2)) / 2
    return float(np.sum(first * second) / held) if held else float("nan")


def pooled_correlation(parts: Sequence[tuple[np.ndarray, np.ndarray]], lag: int = 1) -> float:
    """The mean over layers, each as `correlation`; layers without pairs do not count."""
    found = [correlation(rows, numbers, lag) for rows, numbers in parts]
    found = [c for c in found if not np.isnan(c)]
    return float(np.mean(found)) if found else float("nan")


def needed_correlation(ratio: float, bits: float) -> float:
    """The correlation that differences need to be `ratio` times smaller than values of so many bits.

    The difference of two rows has 2 (1 - c) times the variance of one, at the same step that is
    log2(2 (1 - c)) / 2 bits more or fewer. For Gaussian values and steps that are small against them.
    """
    return 1 - 0.5 * 2 ** (-2 * bits * (1 - 1 / ratio))


def saved_bits(correlation: float) -> float:
    """Bits a value that differences save at the same step; negative below a correlation of one half."""
    return 0.5 * float(np.log2(1 / (2 * (1 - correlation)))) if correlation < 1 else float("inf")


def most_saved_bits(correlation: float) -> float:
    """Bits a value that the best use of the neighbour's value can save: the information that the two share.

    For Gaussian values. It is never negative: whoever knows the correlation scales the prediction by it.
    """
    return 0.5 * float(np.log2(1 / (1 - correlation**2))) if abs(correlation) < 1 else float("inf")
