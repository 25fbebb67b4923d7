"""Reports of a run: progress while it lasts, its result, tables and pictures."""
