"""Every measurement that needs an NVIDIA GPU, in one command: ``python -m benchmarks.gpu``."""
