"""What models cost, measured or in closed form, and the result files of evidence runs."""

from jumbo_core.measure.flops import count_parameters, encoder_multiply_adds, multiply_adds
from jumbo_core.measure.report import ResultFile, environment, markdown_table, mean_spread

__all__ = [
    "ResultFile",
    "count_parameters",
    "encoder_multiply_adds",
    "environment",
    "markdown_table",
    "mean_spread",
    "multiply_adds",
]
