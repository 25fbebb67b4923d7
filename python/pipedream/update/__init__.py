"""Weights of one stage: versions, gradients, optimizers' steps, tied parameters, shards of replicas."""
