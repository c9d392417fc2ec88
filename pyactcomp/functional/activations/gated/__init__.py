"""Products of an activation and a gate, and the MLP around them."""
