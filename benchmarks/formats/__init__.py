"""One small training in every recipe of a number format, and MXFP4 raised to MXFP8: loss against cost."""
