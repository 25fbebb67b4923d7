"""This package reports on a run: progress while it lasts, its result, tables and pictures."""
