"""Seed 1: a wide global token for plain transformers (arXiv 2502.15021)."""

from jumbo_core.jumbo.block import JumboBlock
from jumbo_core.jumbo.dropping import linear_drop_rate, random_keep, take_patches
from jumbo_core.jumbo.encoder import JumboEncoder
from jumbo_core.jumbo.groups import param_groups
from jumbo_core.jumbo.stack import BlockStack, JumboOutput
from jumbo_core.jumbo.token import JumboFFN, join_slices, split_slices

__all__ = [
    "BlockStack",
    "JumboBlock",
    "JumboEncoder",
    "JumboFFN",
    "JumboOutput",
    "join_slices",
    "linear_drop_rate",
    "param_groups",
    "random_keep",
    "split_slices",
    "take_patches",
]
