"""A user's model and data as a run sees them: stage modules, boundaries, microbatches, precision, seeds."""
