"""The life of a worker, from the agreement with the others to the end of its run."""
