"""Pictures of results. Matplotlib comes with the extra `explore`."""

from .base import pyplot, save_figure
from .capacity import capacity_figure, claims_figure, decimal_size, page_figure, row_figure
from .gate import gate_figure
from .holders import Holding, pages_figure
from .knockout import damage_figure, error_figure
from .precision import precision_figure, rounding_figure
from .prefix import TreeFrame, eviction_figure, tree_frame, trees_figure
from .reach import Pooled, Reach, cache_figure, pooled_figure, reach_figure
from .replay import (
    Cost,
    conversation_figure,
    exact_rows_figure,
    policy_cost_figure,
    replay_error_figure,
)
from .state import live_counts_figure, live_rows_figure, state_bytes_figure
from .tiers import crossover_figure, sources_figure
from .training import curve_figure, position_figure
from .weights import index_figure, pooling_weights_figure, shares_figure

__all__ = [
    "Cost",
    "Holding",
    "Pooled",
    "Reach",
    "TreeFrame",
    "cache_figure",
    "capacity_figure",
    "claims_figure",
    "conversation_figure",
    "crossover_figure",
    "curve_figure",
    "damage_figure",
    "decimal_size",
    "error_figure",
    "eviction_figure",
    "exact_rows_figure",
    "gate_figure",
    "index_figure",
    "live_counts_figure",
    "live_rows_figure",
    "page_figure",
    "pages_figure",
    "policy_cost_figure",
    "pooled_figure",
    "pooling_weights_figure",
    "position_figure",
    "precision_figure",
    "pyplot",
    "reach_figure",
    "replay_error_figure",
    "rounding_figure",
    "row_figure",
    "save_figure",
    "shares_figure",
    "sources_figure",
    "state_bytes_figure",
    "tree_frame",
    "trees_figure",
]
