"""The start of a run in the caller: its options, where its workers are, local workers."""
