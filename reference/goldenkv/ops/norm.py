"""RMSNorm: report section 2.3.3, "query and key-value entry normalization"."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .typed import typed


@typed
def rms_norm(
    x: Float[Array, "*rows d"], weight: Float[Array, " d"] | None = None, eps: float = 1e-6
) -> Float[Array, "*rows d"]:
    """Divides each row by its root mean square: x / sqrt(mean(x^2) + eps) * weight.

    Computed in float32, returned in the dtype of `x`.

    Args:
        x: rows of any number, normalised over the last axis.
        weight: a gain a channel, or None for the norm without a weight (query heads, mHC).
        eps: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        normal = normal * weight.astype(jnp.float32)
    return normal.astype(x.dtype)
