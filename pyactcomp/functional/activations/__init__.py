"""GELU and the inside of SwiGLU, which store their inputs in codes."""
