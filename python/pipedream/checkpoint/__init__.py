"""The state of stages: this package copies it, writes it into checkpoints, reads it, and sends it between
ranks."""
