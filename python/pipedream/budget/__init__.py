"""A worker's memory: the prediction of what it needs, the rehearsal that measures it, and ways to save
some."""
