"""Plans which blocks of a model keep, compress or run again under a budget of memory."""
