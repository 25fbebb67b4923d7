"""A plan's schedule in simulated time: traces, text and pictures. Torch-free."""
