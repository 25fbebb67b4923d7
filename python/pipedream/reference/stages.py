"""Runs the forward of one stage. A stage that recomputes and does not stash repeats the forward before its
backward, with the newest weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipedream import _core
from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.loss_state import call_loss
from pipedream.model.references import frozen_meanwhile
from pipedream.model.seeding import RngState, generators_kept, seed_torch
from pipedream.model.stage_module import StageModule
from pipedream.reference.updates import Updater

__all__ = [
    "At",
    "CutFunction",
    "LossFunction",
    "MinibatchStatistics",
    "Recomputed",
    "ReplicaBuffers",
    "Stage",
    "cross",
]

LossFunction = Callable[[Any, Any], Tensor]
At = tuple[int, int]
"""(minibatch, microbatch in it)."""


@dataclass
class Stage:
    """One stage's forward, and the state around it."""

    module: StageModule
    recomputes_newest: bool
    """Whether the stage repeats the forward with the newest version right before the backward. The backward
    then goes through the repeated forward."""
    backward_seed: int | None
    """The seed of random numbers in the stage's backward. None draws them from the process's generators."""
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    loss_fn: LossFunction | None
    """The loss function at the last stage, whose output is then the loss. It is None at other stages."""
    statistics_of: Sequence[MinibatchStatistics]
    """The running statistics of batch norms, one entry per replica; empty if a minibatch has one
    microbatch."""
    updaters: list[Updater]
    """One updater for the stage, or one per replica if each replica has its own parameters."""
    buffers: ReplicaBuffers
    replica: int = 0
    """The replica whose microbatch is computed."""
    in_microbatches: bool = False
    """Whether the data yield Microbatches. Then batch norms update their statistics once per microbatch, as
    in plain training with accumulated gradients."""

    @property
    def statistics(self) -> MinibatchStatistics | None:
        if self.in_microbatches or not self.statistics_of:
            return None
        return self.statistics_of[self.replica]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters that the stage updates."""
        return self.updaters[0].parameters

    def gradient_of(self, parameter: nn.Parameter, leaf: Tensor) -> Tensor | None:
        """Returns the gradient of a leaf of the parameter; None if it has none. Raises ValueError if the
        model's code has frozen the leaf during the run.
        """
        if leaf.grad is None and not leaf.requires_grad:
            named = self.module.trainable_parameters()
            raise frozen_meanwhile(next(name for name, other in named if other is parameter))
        return leaf.grad

    def updater_of(self, replica: int) -> Updater:
        """Returns the updater whose weights the replica reads and which gets the replica's gradients."""
        return self.updaters[replica % len(self.updaters)]

    @torch.no_grad()
    def average(self) -> None:
        """Sets all replicas' parameters to their mean."""
        if len(self.updaters) == 1:
            return
        for copies in zip(*(updater.parameters for updater in self.updaters), strict=True):
            mean = torch.stack([parameter.detach() for parameter in copies]).mean(0)
            for parameter in copies:
                parameter.copy_(mean)

    def use(self, replica: int) -> None:
        """Chooses the replica whose microbatch is computed next."""
        self.replica = replica
        self.buffers.use(replica)

    def seed_backward(self, at: At) -> None:
        """Seeds the random generators for the stage's backward of the microbatch."""
        if self.module.draws is not None:
            self.module.draws.go_back_to(*at)
        if self.backward_seed is not None:
            seed_torch(_core.derived_seed(_core.derived_seed(self.backward_seed, at[0]), at[1]))

    def seeding_backward(self, value: Any, at: At) -> Any:
        """Returns the stage's output with a hook. The hook seeds the random generators for the stage's
        backward when the output's gradient arrives.
        """
        for tensor in tensors_of(value):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.seed_backward(at))  # type: ignore[no-untyped-call]
        return value

    def forward(self, value: Any, targets: Any, at: At) -> Any:
        if len(self.buffers) > 1:  # before the backward, the module may get other replicas' buffers
            return self.forward_on_copies(value, targets, at)
        return self._forward(value, targets, {}, at, is_first_time=True)

    def forward_on_copies(self, value: Any, targets: Any, at: At) -> Any:
        """Runs the forward on copies of the buffers, because the buffers may change before the backward."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        output = self._forward(value, targets, buffers, at, is_first_time=True)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])
        return output

    def forward_again(
        self, value: Any, targets: Any, buffers: dict[str, Tensor], at: At | None = None
    ) -> Any:
        """Repeats the forward with the given buffers. The stage's own buffers do not change. at: the
        microbatch whose random numbers are drawn again; None draws new ones.
        """
        return self._forward(value, targets, buffers, at, is_first_time=False)

    def _forward(
        self, value: Any, targets: Any, buffers: dict[str, Tensor], at: At | None, *, is_first_time: bool
    ) -> Any:
        draws = self.module.draws
        if draws is not None and at is not None:
            draws.begin(*at, self.module)
        with contextlib.ExitStack() as around:
            if self.statistics is not None:
                around.enter_context(self.statistics.microbatch(collect=is_first_time))
            around.enter_context(self.autocast())
            if buffers:
                output = torch.func.functional_call(self.module, buffers, (value,))
            else:
                output = self.module(value)
        if self.loss_fn is None:
            return output
        if draws is not None:
            draws.begin_loss()
        with self.autocast():
            return call_loss(self.loss_fn, output, targets)


class ReplicaBuffers:
    """Stores the buffers of each replica of a stage. The module has those of the replica that was used
    last."""

    def __init__(self, module: StageModule, num_replicas: int) -> None:
        self._module = module
        self._num_replicas = num_replicas
        self._in_use = 0
        initial = {name: buffer.clone() for name, buffer in module.stage_buffers()}
        self._kept = [initial] * num_replicas

    def __len__(self) -> int:
        """Returns the number of replicas."""
        return self._num_replicas

    def use(self, replica: int) -> None:
        """Puts the replica's buffers into the module."""
        if self._num_replicas == 1 or replica == self._in_use:
            return
        self._keep()
        self._in_use = replica
        self._put(self._kept[self._in_use])

    def average(self) -> None:
        """Sets floating-point buffers to the mean over the replicas. Other buffers, such as counts, get the
        first replica's value."""
        if self._num_replicas == 1:
            return
        self._keep()
        averaged = dict(self._kept[0])
        for name, buffer in averaged.items():
            if buffer.is_floating_point():
                averaged[name] = torch.stack([kept[name] for kept in self._kept]).mean(0)
        self._put(averaged)

    def _keep(self) -> None:
        self._kept[self._in_use] = {name: buffer.clone() for name, buffer in self._module.stage_buffers()}

    def _put(self, content: Mapping[str, Tensor]) -> None:
        for name, buffer in self._module.stage_buffers():
            buffer.copy_(content[name])


class Recomputed:
    """A microbatch's forward at a stage. The forward is repeated with newer weights just before the backward.

    upstream graph -> inputs -> first forward -> outputs without a graph (leaves) -> downstream graph -> loss
                            \\-> repeated forward -> outputs, which get the gradients of the leaves
    """

    def __init__(self, stage: Stage, inputs: Any, targets: Any, at: At) -> None:
        self._stage = stage
        self._at = at
        self._inputs = inputs
        self._targets = targets
        self._buffers = {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
        self._generators = RngState.capture()
        # The inputs are cloned, because the first layer may work in place.
        outputs = stage.forward(map_tensors(Tensor.clone, inputs), targets, at)
        self._outputs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), outputs)

    def outputs(self) -> Any:
        """Returns the outputs for the next stage."""
        return map_tensors(Tensor.clone, self._outputs)

    def backward(self) -> None:
        """Repeats the forward and runs its backward. Call it after the backward of the stages downstream."""
        with generators_kept():
            self._generators.restore()
            outputs = self._stage.forward_again(self._inputs, self._targets, self._buffers, self._at)
        roots = [
            (output, leaf.grad)
            for output, leaf in zip(tensors_of(outputs), tensors_of(self._outputs), strict=True)
            if leaf.grad is not None
        ]
        self._stage.seed_backward(self._at)
        torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])


CutFunction = Callable[[int, int, int, Tensor], Tensor]


class _Cut(torch.autograd.Function):
    """Passes a tensor from one stage to another, and its gradient back. across_cut may change both."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sender: int, receiver: int, tensor_index: int, across_cut: CutFunction
    ) -> Tensor:
        ctx.back = (receiver, sender, tensor_index, across_cut)
        return across_cut(sender, receiver, tensor_index, tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        receiver, sender, tensor_index, across_cut = ctx.back
        return across_cut(receiver, sender, tensor_index, gradients[0]), None, None, None, None


def cross(value: Any, sender: int, receiver: int, across_cut: CutFunction) -> Any:
    """Returns the value after across_cut has changed its floating-point tensors. The tensor_index that
    across_cut gets counts all tensors of the value.
    """
    indices = itertools.count()

    def cross(tensor: Tensor) -> Tensor:
        tensor_index = next(indices)
        if not tensor.is_floating_point():
            return tensor
        crossed: Tensor = _Cut.apply(tensor, sender, receiver, tensor_index, across_cut)  # type: ignore[no-untyped-call]
        return crossed

    return map_tensors(cross, value)


class MinibatchStatistics:
    """Updates the running statistics of a stage's batch norms if minibatches are cut into microbatches. Each
    microbatch is normalised by its own mean and variance. The running statistics take one step per minibatch,
    by the mean and variance over all microbatches of the minibatch.

    Source: GPipe (NeurIPS'19), section 2.2.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
        self._inputs: dict[_BatchNorm, list[Tensor]] = {}

    @contextlib.contextmanager
    def microbatch(self, *, collect: bool) -> Iterator[None]:
        """Wraps a forward. collect: whether the forward's inputs count for the running statistics."""
        tracking = [norm for norm in self._norms if norm.track_running_stats]
        hooks = [norm.register_forward_pre_hook(self._collect) for norm in tracking if collect]
        for norm in tracking:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in tracking:
                norm.track_running_stats = True
            for hook in hooks:
                hook.remove()

    def _collect(self, norm: Any, arguments: tuple[Any, ...]) -> None:
        if not norm.training:  # the forward itself may have switched it to eval mode
            return
        self._inputs.setdefault(norm, []).append(arguments[0].detach().clone())

    def update(self) -> None:
        for norm, inputs in self._inputs.items():
            assert norm.running_mean is not None
            momentum = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1
                if momentum is None:
                    momentum = 1 / float(norm.num_batches_tracked)
            # The shape is (samples, channels). Positions of an image count as samples.
            values = torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], dim=1).t()
            with torch.no_grad():
                F.batch_norm(
                    values.to(norm.running_mean.dtype),
                    norm.running_mean,
                    norm.running_var,
                    training=True,
                    momentum=momentum or 0.0,
                )
        self._inputs.clear()
