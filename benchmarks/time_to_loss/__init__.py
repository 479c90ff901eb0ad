"""The time that several methods take to train one small language model to the same loss."""
