"""A worker's memory: what it will need, the rehearsal that measures it, what saves some of it."""
