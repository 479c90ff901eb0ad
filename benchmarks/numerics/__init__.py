"""Benchmarks of fractrain_fx.numerics."""
