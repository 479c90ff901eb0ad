"""Linear layers that torchao computes."""
