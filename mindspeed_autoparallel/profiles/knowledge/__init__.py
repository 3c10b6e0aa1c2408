"""Costs of single operators on a device: measured once, shared by every search."""

from mindspeed_autoparallel.profiles.knowledge.base import KnowledgeBase, Operator, Sample
from mindspeed_autoparallel.profiles.knowledge.signature import Signature

__all__ = ["KnowledgeBase", "Operator", "Sample", "Signature"]
