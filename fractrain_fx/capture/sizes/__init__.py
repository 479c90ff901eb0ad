"""Sizes that remember where they came from, and what the code of a model looks at of them."""
