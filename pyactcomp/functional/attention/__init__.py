"""Softmax of scores, and rotary embeddings of queries and keys."""
