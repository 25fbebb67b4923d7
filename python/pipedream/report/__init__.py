"""This package reports on a run: its progress, its result, and tables and pictures of the result."""
