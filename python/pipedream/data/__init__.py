"""Reading minibatches at the stages that need them."""
