"""Seed 3: token fusion (ToFu, arXiv 2312.01026): prune, average or merge tokens of models people already have."""

from jumbo_core.tofu import hosts_adventurer, hosts_eva  # noqa: F401 (they register their hosts)
from jumbo_core.tofu.apply import FusedModel, FusionReport, apply_tofu, is_fused, remove_tofu
from jumbo_core.tofu.hosts import FusionHost, register_host
from jumbo_core.tofu.importance import attention_received, gradient_importance
from jumbo_core.tofu.linearity import LinearityProfile, linearity_profile
from jumbo_core.tofu.matching import Matching, match
from jumbo_core.tofu.operators import compose, fuse, source_map, unmerge
from jumbo_core.tofu.plan import Clamp, FusionPlan
from jumbo_core.tofu.search import PlanSearch, search_plan

__all__ = [
    "Clamp",
    "FusedModel",
    "FusionHost",
    "FusionPlan",
    "FusionReport",
    "LinearityProfile",
    "Matching",
    "PlanSearch",
    "apply_tofu",
    "attention_received",
    "compose",
    "fuse",
    "gradient_importance",
    "is_fused",
    "linearity_profile",
    "match",
    "register_host",
    "remove_tofu",
    "search_plan",
    "source_map",
    "unmerge",
]
