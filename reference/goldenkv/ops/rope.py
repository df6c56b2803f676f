"""Rotary position embedding on the trailing channels, interleaved pairs, with YaRN frequencies.

Report section 2.3.3 ("partial rotary positional embedding"); YaRN: arXiv 2309.00071.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from .apart import apart
from .typed import typed


def frequencies(
    rope_dims: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_length: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Float32[np.ndarray, " half"]:
    """Angle a position for each rotated pair: theta^(-2i / rope_dims), float32 [rope_dims / 2].

    With `factor` above 1, YaRN: pairs that turn more than `beta_fast` times within `original_length` keep
    their frequency, pairs that turn less than `beta_slow` times are slowed by `factor`, and a linear ramp
    over the pair index joins the two.
    """
    pair = np.arange(rope_dims // 2, dtype=np.float32)
    plain = np.float32(1.0) / np.power(np.float32(theta), 2 * pair / np.float32(rope_dims), dtype=np.float32)
    if factor == 1.0:
        return plain

    def pair_that_turns(times: float) -> float:
        return rope_dims * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), rope_dims - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1).astype(np.float32)
    return (plain / np.float32(factor) * ramp + plain * (1 - ramp)).astype(np.float32)


@typed
def rotate(
    x: Float[Array, "t *heads d"],
    positions: Int[Array, " t"],
    frequency: Float32[np.ndarray | Array, " half"],
    *,
    inverse: bool = False,
) -> Float[Array, "t *heads d"]:
    """Rotates the trailing 2 * half channels of each row by its position; the leading ones pass unchanged.

    Channels 2i and 2i + 1 of the rotated part form pair i. With `inverse` the angle is negated: it undoes
    the rotation that values carry because K = V (applied to the output of attention at the query's
    position).

    Args:
        x: rows, one a position, with any axes between.
        positions: absolute positions from 0.
        frequency: from `frequencies`.
    """
    half = frequency.shape[0]
    angle = positions.astype(jnp.float32)[:, None] * frequency
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = apart(jnp.any(positions >= 0), lambda: (jnp.cos(angle), jnp.sin(angle)))
    sin = -sin if inverse else sin
    plain, rotated = x[..., : -2 * half], x[..., -2 * half :].astype(jnp.float32)
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([plain, turned.reshape(rotated.shape).astype(x.dtype)], axis=-1)
