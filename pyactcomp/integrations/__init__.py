"""Compression inside trainers: one module for each trainer, importing only this trainer."""
