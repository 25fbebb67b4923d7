"""This package shows a plan's schedule in simulated time, as traces, text and pictures. Torch-free."""
