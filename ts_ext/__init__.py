"""Time series: JumboPatchTST on torch and timm, and its adapters to the hosts (``ts_ext.tsai``, …)."""

from ts_ext.losses import ObservedMSELoss, PinballLoss
from ts_ext.patchtst import JumboPatchTST
from ts_ext.pretraining import PretrainOutput
from ts_ext.scaling import RevIN
from ts_ext.values import pad_windows

__all__ = ["JumboPatchTST", "ObservedMSELoss", "PinballLoss", "PretrainOutput", "RevIN", "pad_windows"]
