"""Seed 2, the student: the Mamba-2 scan, its mixer and the Adventurer encoder."""

from jumbo_core.linear.adventurer import AdventurerBlock, AdventurerEncoder
from jumbo_core.linear.mamba2 import Mamba2Mixer, MixerState
from jumbo_core.linear.ssd import ssd_scan, ssd_scan_reference

__all__ = [
    "AdventurerBlock",
    "AdventurerEncoder",
    "Mamba2Mixer",
    "MixerState",
    "ssd_scan",
    "ssd_scan_reference",
]
