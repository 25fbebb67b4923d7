"""The state of stages, in files and on its way to rank 0."""
