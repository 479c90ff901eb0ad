"""The plots as Vega-Lite, each over a named table (``frames``), without data and with the theme's colours only."""

from fractrain_fx.report.charts.choices import allocation, bits, information, samples
from fractrain_fx.report.charts.costs import MEASURES, blocks, machines, paths, stages
from fractrain_fx.report.charts.epochs import AXES, cost, trajectory
from fractrain_fx.report.charts.numerics import op_ranges, op_ratios, ratio_map
from fractrain_fx.report.charts.sensitivity import harm_map

__all__ = [
    "AXES",
    "MEASURES",
    "allocation",
    "bits",
    "blocks",
    "cost",
    "harm_map",
    "information",
    "machines",
    "op_ranges",
    "op_ratios",
    "paths",
    "ratio_map",
    "samples",
    "stages",
    "trajectory",
]
