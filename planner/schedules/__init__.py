"""The order in which a pipeline stage runs its microbatches, one file a schedule."""
