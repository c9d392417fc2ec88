"""Attention within windows and the residual addition after it, for Swin Transformers."""
