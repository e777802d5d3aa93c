"""Time series: JumboPatchTST on torch and timm, and its adapters to the hosts (``ts_ext.tsai``)."""

from ts_ext.patchtst import JumboPatchTST
from ts_ext.scaling import RevIN

__all__ = ["JumboPatchTST", "RevIN"]
