"""The table of a rewritten model: the cost of each block and op, and the reason for its precision."""

from fractrain_fx.summary.summary import Summary, summarize

__all__ = ["Summary", "summarize"]
