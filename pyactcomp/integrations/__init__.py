"""Compression inside trainers: one module for each, which imports that trainer and nothing of the others."""
