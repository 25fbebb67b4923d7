"""Reference: the slow, obvious, single-process oracle of the schedules, in plain PyTorch.

It keeps a full copy of every weight version that may still be read and computes minibatch after
minibatch, so it shows what numbers a schedule must give, not how to get them fast. The fast path is
compared with it. Random numbers: see seeding.py. All stages of a module that is cut are that one module: what
its forward counts in attributes is counted once a stage, where workers have modules of their own.

    a minibatch   1. leaves of every parameter, with the contents of the versions that its microbatches read
                  2. forward of each microbatch through all stages, in order, and its loss
                  3. unstashed only: the leaves get the content of the newest version, in place
                  4. backward of each microbatch, in the same order; gradients add up in the leaves
                  5. one update per stage of the model's own parameters, which are the newest version: after
                     the last minibatch of a round, with the mean of the round's gradients

A round is a minibatch. With replicas, whose numbers are computed one after the other, microbatches are dealt
to a stage's r replicas in turn, and a round is as many minibatches as give each of them equally many, for a
schedule that drains each replica of every stage; the last one may be short. Each replica has buffers of its
own, whose mean the model has in the end.
"""

from __future__ import annotations

from pipedream.reference.training import ReferenceResult, run

__all__ = ["ReferenceResult", "run"]
