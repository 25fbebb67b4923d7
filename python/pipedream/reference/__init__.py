"""Reference: the slow, obvious, single-process oracle of the schedules, in plain PyTorch.

It keeps a full copy of every weight version that may still be read and computes minibatch after
minibatch, so it shows what numbers a schedule must give, not how to get them fast. The fast path is
compared with it. Random numbers: see seeding.py. All stages of a module that is cut are that one module: what
its forward counts in attributes is counted once a stage, where workers have modules of their own.

    a minibatch   1. a leaf of every parameter, with the content of the version that its stage reads
                  2. forward of each microbatch through all stages, in order, and its loss
                  3. naive only: the leaves get the content of the newest version, in place
                  4. backward of each microbatch, in the same order; gradients add up in the leaves
                  5. one update per stage of the model's own parameters, which are the newest version: after
                     the last minibatch of a round, with the mean of the round's gradients

A round is a minibatch. With replicas, whose numbers are computed one after the other, it is the r minibatches
in a row of a stage's r replicas, and for a schedule that drains as many as the least common multiple of all
stages' replicas, at every stage; the last one may be short. Each replica has buffers of its own, whose mean
the model has in the end.
"""

from __future__ import annotations

from pipedream.reference.training import ReferenceResult, run

__all__ = ["ReferenceResult", "run"]
