"""Starts runs: checks options, starts local workers, or makes a rank of torchrun a worker. Also starts the
profiler, calibrations and measurements of links."""
