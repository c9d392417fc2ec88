"""The demo: a small transformer trained plain, compressed and checkpointed."""
