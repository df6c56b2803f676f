"""Matrix products with their precision stated, and the grouped output projection."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .typed import typed


@typed
def contract(equation: str, *operands: Float[Array, "..."]) -> Float32[Array, "..."]:
    """An einsum in float32 at the highest precision.

    Products of two bfloat16 values are exact in float32, so for them this is "accumulate in float32".
    """
    wide = (operand.astype(jnp.float32) for operand in operands)
    return jnp.einsum(equation, *wide, precision="highest")


@typed
def project(x: Float[Array, "*rows i"], weight: Float[Array, "i o"]) -> Float[Array, "*rows o"]:
    """x @ weight, accumulated in float32, returned in the dtype of `x`."""
    return contract("...i,io->...o", x, weight).astype(x.dtype)


@typed
def grouped_output(
    heads: Float[Array, "t h d"], group_weight: Float[Array, "g i r"], out_weight: Float[Array, "gr o"]
) -> Float[Array, "t o"]:
    """Grouped output projection (report section 2.3.1, "grouped output projection").

    The h heads form g groups of consecutive heads; each group is projected to r channels by its own matrix,
    and one matrix mixes the g * r channels into the hidden size.

    Args:
        heads: outputs of core attention, after the inverse rotation.
        group_weight: a matrix a group, i = h / g * d inputs and r outputs.
        out_weight: the mixing matrix, g * r inputs.
    """
    groups = heads.reshape(heads.shape[0], group_weight.shape[0], -1)
    low_rank = [project(groups[:, g], group_weight[g]) for g in range(group_weight.shape[0])]
    return project(jnp.concatenate(low_rank, axis=-1), out_weight)
