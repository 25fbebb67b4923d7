"""One stage's training: weight versions, gradients, forward and backward, the loop over work items."""
