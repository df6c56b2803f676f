"""Parity with transformers' DeepseekV4ForCausalLM on seeded random weights, in float32."""

import sys

import numpy as np
import pytest
from flax import nnx

from goldenkv import parity
from goldenkv.config import ModelConfig
from goldenkv.engine.engine import Engine
from goldenkv.errors import MissingExtra
from goldenkv.model.weights import Model

CONFIGS = parity.transformers_configs()


@pytest.fixture
def _transformers() -> None:
    pytest.importorskip("torch", reason="the extra 'parity' is not installed: no torch")
    pytest.importorskip("transformers", reason="the extra 'parity' is not installed: no transformers")


@pytest.mark.usefixtures("_transformers")
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str) -> None:
    (report,) = parity.compare_transformers({name: CONFIGS[name]})
    assert report.ok, report
    assert [row.name for row in report.rows] == [
        "logits, one prefill",
        "logits, decode after 260",
    ]


@pytest.fixture(scope="module")
def theirs() -> tuple[Model, np.ndarray, np.ndarray]:
    pytest.importorskip("transformers", reason="the extra 'parity' is not installed: no transformers")
    config = CONFIGS["Pro-like"]
    model = Model(config, seed=1)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 300)
    return model, tokens, parity.transformers_logits(model, config, tokens, 299)["prefill"]


def difference(model: Model, config: ModelConfig, tokens: np.ndarray, logits: np.ndarray) -> float:
    engine = Engine(model, config, slots=2, max_length=420)  # the program of `test_logits`
    ours = engine.prefill(engine.open(), tokens, all_logits=True)
    return parity.compare_arrays("logits", ours, logits, 1e-4).difference


def test_the_unchanged_model_passes(theirs) -> None:
    model, tokens, logits = theirs
    assert difference(model, CONFIGS["Pro-like"], tokens, logits) < 1e-4


def test_a_changed_model_fails(theirs, control) -> None:
    original, tokens, logits = theirs
    model = nnx.clone(original)
    assert difference(model, control(model, CONFIGS["Pro-like"]), tokens, logits) > 1e-2


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'goldenkv\[parity\]'"):
        parity.compare_transformers({"any": CONFIGS["HCA only"]}, length=4, prefix=2)
