"""Sizes that remember where they came from, and guards for the sizes that a model's code reads."""
