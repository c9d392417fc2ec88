"""Benches: ours and the peers in one run, every number with its origin (see ``python -m bench --help``)."""
