"""Everything besides arguments that a model's code can read or change: what a recording read of it, and what it is now.

Attributes, modes of parts, torch's settings, buffers, generators. docs/how-to/sizes.md has the list as a table.
"""
