"""Measurements; run as modules, for example ``python -m benchmarks.rewrite``."""
