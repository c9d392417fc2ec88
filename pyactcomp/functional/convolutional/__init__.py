"""Batch norm and max-pool, for convolutional networks."""
