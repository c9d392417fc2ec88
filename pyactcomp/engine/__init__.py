"""The engine: the saved-tensor hooks of a forward, their decisions, and the stored forms held by autograd."""
