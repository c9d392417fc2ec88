"""Compresses what the graphs of torch.compile save for backward."""
