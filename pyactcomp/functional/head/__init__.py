"""The loss head of language models, a chunk of rows at a time."""
