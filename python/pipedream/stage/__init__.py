"""One stage's training: forward and backward, the loop over work items, events between minibatches."""
