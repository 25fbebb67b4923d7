"""The start of a run: its options, local workers and their life."""
