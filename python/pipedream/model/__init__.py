"""A user's model as layers: splitting, boundaries, microbatches, precision, recomputation, the profiler."""
