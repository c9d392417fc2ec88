"""Dropout: on the CPU with one bit an element, and the random numbers of fused kernels."""
