"""Front ends for training libraries: thin, each with its library as an extra of the package."""
