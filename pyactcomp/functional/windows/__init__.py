"""Attention within windows and the residual addition behind it, for Swin Transformers."""
