"""Prepare the call of a model: remove its wrappers, find example inputs, name arguments as placeholders."""
