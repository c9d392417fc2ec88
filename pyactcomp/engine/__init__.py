"""The engine: the hooks of a forward, and everything that they decide and leave with autograd."""
