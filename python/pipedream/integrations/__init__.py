"""This package has front ends for training libraries. Each library is an optional dependency (an extra)."""
