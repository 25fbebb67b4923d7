"""This package reads minibatches at the stages that need them."""
