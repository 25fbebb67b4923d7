"""This package plans a worker's memory: it predicts the bytes that a worker needs, measures them in a
rehearsal, and has ways to save some."""
