"""One stage: its forward, what it needs around it, and its forward once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.loss_placement import call_loss
from pipedream.model.references import frozen_meanwhile
from pipedream.model.seeding import MinibatchStreams, RngState, generators_kept
from pipedream.model.stage_module import StageModule
from pipedream.reference.batch_norms import MinibatchStatistics
from pipedream.reference.updates import Updater

__all__ = ["LossFunction", "Recomputed", "ReplicaBuffers", "Stage"]

LossFunction = Callable[[Any, Any], Tensor]


@dataclass
class Stage:
    """One stage's forward, and what it needs around it."""

    module: StageModule
    recomputes_newest: bool
    """Whether its backward runs on a forward that is done again at the newest version."""
    streams: MinibatchStreams | None
    """Of random numbers; None for those of the process."""
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    loss_fn: LossFunction | None
    """Of the last stage, whose output is the loss."""
    statistics: MinibatchStatistics | None
    """With several microbatches per minibatch."""
    updaters: list[Updater]
    """One, or one of each replica, with parameters of its own."""
    buffers: ReplicaBuffers

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's, that the stage updates."""
        return self.updaters[0].parameters

    def gradient_of(self, parameter: nn.Parameter, leaf: Tensor) -> Tensor | None:
        """What a backward left at the parameter's leaf. Raises ValueError where that was frozen meanwhile."""
        if leaf.grad is None and not leaf.requires_grad:
            named = self.module.trainable_parameters()
            raise frozen_meanwhile(next(name for name, other in named if other is parameter))
        return leaf.grad

    def updater_of(self, minibatch: int) -> Updater:
        """Which has the weights that the minibatch reads, and takes its gradients."""
        return self.updaters[minibatch % len(self.updaters)]

    @torch.no_grad()
    def average(self) -> None:
        """All replicas' parameters become their mean."""
        if len(self.updaters) == 1:
            return
        for copies in zip(*(updater.parameters for updater in self.updaters), strict=True):
            mean = torch.stack([parameter.detach() for parameter in copies]).mean(0)
            for parameter in copies:
                parameter.copy_(mean)

    def begin(self, minibatch: int) -> None:
        if self.streams is not None:
            self.streams.begin(minibatch)
        self.buffers.use(minibatch)

    @property
    def stream(self) -> contextlib.AbstractContextManager[Any]:
        region = None if self.streams is None else self.streams.region
        return contextlib.nullcontext() if region is None else region

    def forward(self, value: Any, targets: Any) -> Any:
        with self.stream:
            return self._forward(value, targets, buffers={}, is_first_time=True)

    def forward_on_copies(self, value: Any, targets: Any) -> Any:
        """The same, where the buffers change before the backward: its graph has copies of them."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with self.stream:
            output = self._forward(value, targets, buffers, is_first_time=True)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])
        return output

    def forward_again(self, value: Any, targets: Any, buffers: dict[str, Tensor]) -> Any:
        """Draws from the generators as they are, works on these buffers and leaves the stage's own alone."""
        return self._forward(value, targets, buffers, is_first_time=False)

    def _forward(self, value: Any, targets: Any, buffers: dict[str, Tensor], *, is_first_time: bool) -> Any:
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
        with self.autocast():
            return call_loss(self.loss_fn, output, targets)


class ReplicaBuffers:
    """A stage's buffers, of each of its replicas; the module has those of the replica that was used last."""

    def __init__(self, module: StageModule, num_replicas: int) -> None:
        self._module = module
        self._num_replicas = num_replicas
        self._in_use = 0
        initial = {name: buffer.clone() for name, buffer in module.stage_buffers()}
        self._kept = [initial] * num_replicas

    def __len__(self) -> int:
        """The replicas."""
        return self._num_replicas

    def use(self, minibatch: int) -> None:
        """The replica's that has the minibatch."""
        if self._num_replicas == 1:
            return
        self._keep()
        self._in_use = minibatch % self._num_replicas
        self._put(self._kept[self._in_use])

    def average(self) -> None:
        """Floating-point ones; the others, such as counts, are the first replica's."""
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
    """One microbatch's forward of a stage that will be done again at newer weights, just before its backward.

    upstream graph -> inputs -> forward, its graph dropped     outputs (leaves) -> downstream graph -> loss
                            \\-> forward again -> its outputs, given the gradients of the leaves
    """

    def __init__(self, stage: Stage, inputs: Any, targets: Any) -> None:
        self._stage = stage
        self._inputs = inputs
        self._targets = targets
        self._buffers = {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
        with stage.stream:
            self._generators = RngState.capture()
        # A clone: the first layer may work in place.
        outputs = stage.forward(map_tensors(Tensor.clone, inputs), targets)
        self._outputs = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), outputs)

    def outputs(self) -> Any:
        """What goes downstream."""
        return map_tensors(Tensor.clone, self._outputs)

    def backward(self) -> None:
        """After the backward of everything downstream."""
        with generators_kept():
            self._generators.restore()
            outputs = self._stage.forward_again(self._inputs, self._targets, self._buffers)
        roots = [
            (output, leaf.grad)
            for output, leaf in zip(tensors_of(outputs), tensors_of(self._outputs), strict=True)
            if leaf.grad is not None
        ]
        torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
