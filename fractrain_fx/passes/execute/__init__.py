"""Passes that make the copy which runs."""
