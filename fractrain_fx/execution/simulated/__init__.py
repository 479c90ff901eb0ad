"""A fused op in float: its operands rounded, contracted, and rounded again for backward."""
