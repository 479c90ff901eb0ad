"""The table that says what each block and op costs, and why it has its precision."""

from fractrain_fx.summary.summary import Summary, summarize

__all__ = ["Summary", "summarize"]
