"""The time and the bytes of every layer of a model, measured on one device."""
