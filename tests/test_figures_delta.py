"""Pictures of the delta study: what is drawn is what was measured."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from goldenkv.figures import save_figure
from goldenkv.figures.delta import (
    codec_figure,
    correlation_figure,
    delta_figure,
    keyframe_figure,
    rate_figure,
)


def results(near: float = 0.3) -> dict:
    def coded(component: str, codec: str, ratio: float) -> dict:
        return {"component": component, "codec": codec, "ratio": ratio}

    def lossy(family: str, bits: float, kl: float) -> dict:
        return {"family": family, "bits": bits, "effect": {"kl": kl}}

    return {
        "correlations": [
            {"component": "window", "near": near, "far": 0.1, "unrotated": 0.2},
            {"component": "index keys", "near": 0.4, "far": None, "unrotated": None},
        ],
        "lossless": [
            coded("window", "raw native", 1.0), coded("index keys", "raw native", 1.0),
            coded("window", "zstd", 1.25), coded("index keys", "zstd", 1.1),
            coded("window", "delta P", 0.8), coded("index keys", "delta P", 1.0),
        ],
        "distances": [1, 2, 4],
        "sweep": {"window": {"P": [1.25, 1.1, 1.0], "B": [1.25, 1.1, 0.9]}},
        "lossy": [lossy("INT4", 5, 0.1), lossy("transform", 4, 0.01), lossy("transform", 2, 1.0)],
    }  # fmt: skip


def test_bars_are_shares_of_native_bytes() -> None:
    figure = codec_figure(results(), ["zstd", "delta P"])
    heights = [bar.get_height() for container in figure.axes[0].containers for bar in container]
    assert heights == pytest.approx([80, 100 / 1.1, 125, 100])
    plain, framed = (container[0].get_facecolor() for container in figure.axes[0].containers)
    assert plain[2] > plain[0] and framed[0] > framed[2]  # blue without frames, orange with


def test_correlations_and_what_is_not_there() -> None:
    figure = correlation_figure({"one": results(), "two": results(0.7)})
    near, far, unrotated = ([bar.get_height() for bar in c] for c in figure.axes[0].containers)
    assert near == [0.3, 0.4, 0.7, 0.4]
    assert np.isnan([far[1], unrotated[1]]).all() and far[0] == 0.1
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()][::2] == ["window\none", "window\ntwo"]


def test_curves() -> None:
    lines = keyframe_figure({"m": results()}).axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines[:2]] == [[1.25, 1.1, 1.0], [1.25, 1.1, 0.9]]
    (axes,) = rate_figure({"m": results()}).axes
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[5], [2, 4]]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[0.1], [1.0, 0.01]]


def test_all_on_one_page(tmp_path) -> None:
    save_figure(delta_figure({"m": results()}), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
