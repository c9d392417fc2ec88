"""GELU, exact and by tanh, and the chain of operators that Hugging Face writes for it."""
