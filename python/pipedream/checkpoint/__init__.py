"""The state of stages: in the files of checkpoints, and on its way between ranks."""
