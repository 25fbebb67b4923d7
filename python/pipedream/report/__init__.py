"""What a run tells: progress while it lasts, its result, tables and pictures."""
