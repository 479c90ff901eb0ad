"""Kernels that compute what formats define: in C++ on a CPU, in Triton on a GPU, and formats that call them."""
