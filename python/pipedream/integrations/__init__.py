"""Front ends for training libraries. Each library is an optional dependency (an extra) of the package."""
