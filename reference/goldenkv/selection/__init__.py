"""Which entries a CSA+HCA model selects, how well that can be foreseen, and what it is worth.

`record` writes down what the indexer chose, `mass` what attention made of it; `patterns`, `predictors` and
`worth` measure; `feed` tells a cache's strategy; `nonprefix` shows why a page under another prefix is another
page.
"""

from .feed import feed, shadow
from .mass import Attended, Mass, attend_to
from .nonprefix import RowDifference, Splice, SpliceError, Splicer, row_differences
from .patterns import Heat, Reuse, Stability, Zone, batch_reuse, hotness, in_order, stability, turn_reuse
from .predictors import Curve, Predictor, Table, chance, oracle, predictors, recall
from .record import Recording, RecordingError, random_recording, record, record_turns
from .residency import Residency, Step, page_steps, replay
from .study import Study, study
from .ties import decided_by_id, scores_of
from .worth import compare_policies, tune

__all__ = [
    "Attended",
    "Curve",
    "Heat",
    "Mass",
    "Predictor",
    "Recording",
    "RecordingError",
    "Residency",
    "Reuse",
    "RowDifference",
    "Splice",
    "SpliceError",
    "Splicer",
    "Stability",
    "Step",
    "Study",
    "Table",
    "Zone",
    "attend_to",
    "batch_reuse",
    "chance",
    "compare_policies",
    "decided_by_id",
    "feed",
    "hotness",
    "in_order",
    "oracle",
    "page_steps",
    "predictors",
    "random_recording",
    "recall",
    "record",
    "record_turns",
    "replay",
    "row_differences",
    "scores_of",
    "shadow",
    "stability",
    "study",
    "tune",
    "turn_reuse",
]
