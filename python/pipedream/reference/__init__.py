"""The reference is a slow, simple, single-process implementation of the schedules, in plain PyTorch.

It keeps a full copy of every weight version that may still be read, and computes one minibatch after another.
It shows which numbers a schedule must give, not how to get them fast. Tests compare the pipeline with it. For
random numbers see model/seeding.py.

Training a minibatch takes five steps (asynchronous.py has the steps for sync="asp"):

    1. Copy the weight versions that the minibatch's microbatches read into leaves, one leaf per parameter and
       version.
    2. Run the forward of each microbatch through all stages, in order, and compute its loss.
    3. At stages that do not stash: overwrite the leaves with the newest version, in place. The schedule
       unstashed has such stages, and a user's own program may have some.
    4. Run the backward of each microbatch, in the same order. Gradients add up in the leaves.
    5. After the last minibatch of a round, update the model's own parameters, once per stage, with the mean
       of the round's gradients. So the model always has the newest version.

A round is the minibatches of one update. Without replicas it is one minibatch. With r replicas, microbatches
go to the replicas in turn, and are computed one after another. Then a round is the smallest number of
minibatches that gives each replica of the stage equally many microbatches. If the schedule drains, all stages
have the same rounds. The last round may be shorter. Each replica has its own buffers. At the end the model
has their mean.

All stages of a cut module use the same module here. So if the module's code counts in an attribute, it counts
once per stage. In the pipeline each worker has its own copy of the module.
"""

from __future__ import annotations

from pipedream.reference.training import ReferenceResult, run

__all__ = ["ReferenceResult", "run"]
