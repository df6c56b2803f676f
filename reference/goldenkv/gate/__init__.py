"""The reload gate: state survives every way of being kept, bit for bit, and damage does not go unseen.

A cold run computes a prompt, keeps its state, and decodes. Then each *path* gets to the same state in another
way and decodes the same tokens: other chunk plans, a batch with strangers, restored from host memory, from
disk, in a new process, with drafts of which most are rolled back, from a prefix cache under every reload
policy. Every component and every logit must have the same bits. Then each *control* damages the state in one
way that real systems did; a control passes the gate only if the damage is caught.
"""

from .gate import Gate
from .process import ModelSource
from .report import Report, Result, tables

__all__ = ["Gate", "ModelSource", "Report", "Result", "tables"]
