"""This package has optimizers for a pipeline. Native optimizers write the next weight version in one pass
over memory. Muon trains matrices. MasterWeights keeps float32 copies of bfloat16 parameters for torch's
optimizers.
"""

from pipedream.optim.adam import Adam, AdamW, NAdamW
from pipedream.optim.master_weights import MasterWeights
from pipedream.optim.muon import Muon
from pipedream.optim.native_optimizer import NativeOptimizer
from pipedream.optim.sgd import SGD

__all__ = ["NATIVE_OPTIMIZERS", "SGD", "Adam", "AdamW", "MasterWeights", "Muon", "NAdamW", "NativeOptimizer"]

NATIVE_OPTIMIZERS: tuple[type[NativeOptimizer], ...] = (SGD, Adam, AdamW, NAdamW)
"""All native classes. Compare `type(optimizer)` with these and do not use isinstance(), because a subclass
may have another step().
"""
