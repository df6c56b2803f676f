"""Controls: the smallest changes to a model that a comparison must notice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from flax import nnx

from goldenkv.config import ModelConfig
from goldenkv.model.weights import Compressor, Model

Control = Callable[[Model, ModelConfig], ModelConfig]


def _zero(parameter: nnx.Variable | None) -> None:
    if parameter is not None:
        parameter.set_value(parameter[...] * 0)


def no_sinks(model: Model, config: ModelConfig) -> ModelConfig:
    for layer in model.layers:
        _zero(layer.attention.sinks)
    return config


def no_position_bias(model: Model, config: ModelConfig) -> ModelConfig:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Compressor):
            _zero(module.position_bias)
    return config


def no_router_bias(model: Model, config: ModelConfig) -> ModelConfig:
    for layer in model.layers:
        _zero(layer.moe.bias)
    return config


def one_entry_more(model: Model, config: ModelConfig) -> ModelConfig:
    return replace(config, index_topk=config.index_topk + 1)


def no_yarn(model: Model, config: ModelConfig) -> ModelConfig:
    return replace(config, yarn=None)


CONTROLS = [no_sinks, no_position_bias, no_router_bias, one_entry_more, no_yarn]


@pytest.fixture(params=CONTROLS, ids=lambda change: change.__name__)
def control(request: pytest.FixtureRequest) -> Control:
    return request.param
