"""This package measures the time and the bytes of every layer of a model on one device."""
