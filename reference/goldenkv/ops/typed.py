"""`@typed` checks the shapes and dtypes in a function's annotations each time it is called or traced."""

from beartype import beartype
from jaxtyping import jaxtyped

typed = jaxtyped(typechecker=beartype)
