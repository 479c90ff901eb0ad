"""The modules that the copy which runs calls: fused ops, and how they multiply."""
