"""This package prepares a user's model and data for a run: stage modules, boundaries, microbatches, precision
and seeds.
"""
