"""SpanStage is a stage that runs the part of any model's forward between two cuts, by the model's own code.

    1  The model's forward runs from its beginning.
    2  Calls that have ended at the first cut return the received values, without running (crossing.py).
    3  Everything else runs. Outputs that cross at the second cut are kept as calls end.
    4  The end of the span's last call stops the forward.

Code outside calls runs at every stage whose forward reaches it. Results that this code computes from fillers
are not read. Each forward keeps its state in a separate object, because many forwards may be in flight.

A forward may leave out calls of the traced forward, or make other calls, if only one stage is affected. If
the output of such a call crosses a cut, the forward raises an error. Owned by the stage's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import call_model
from pipedream.model.calls import calls_seen, visible_modules
from pipedream.model.draws import DrawSites
from pipedream.model.stage_module import StageModule
from pipedream.model.structure import taken_apart
from pipedream.model.trace import INPUTS, CallCounter, CallKey
from pipedream.splitting.crossing import NOT_CALLED, Crossing, Fillers
from pipedream.splitting.cuts import SpanState

__all__ = ["SpanStage"]


class _Stop(BaseException):
    """Raised to end a forward. It is no Exception, so that user code does not catch it by mistake."""


class SpanStage(StageModule):
    """A stage with layers first_layer..last_layer of a model that is cut along its own forward. It holds the
    whole model, but reports only the parameters and buffers that its span of the forward uses.
    """

    def __init__(
        self,
        stage_index: int,
        first_layer: int,
        layer_names: Sequence[str],
        model: nn.Module,
        *,
        state: SpanState,
        crossing_in: Crossing | None,
        crossing_out: Crossing | None,
        fillers: Fillers | None = None,
        on_begin: Callable[[], None] | None = None,
        draws: DrawSites | None = None,
        call: Callable[[nn.Module, Any], Any] = call_model,
    ) -> None:
        """crossing_in: None at the first stage. crossing_out: None at the last stage. on_begin: called in
        each forward when it reaches the first cut. draws: the places at which the whole model draws. fillers:
        fillers that stages in one process share if they run one after the other. call: a function that runs
        the model.
        """
        super().__init__(stage_index, first_layer, [(layer_names[-1], "", model)])
        self.last_layer = first_layer + len(layer_names) - 1
        self.layer_names = list(layer_names)
        self.traced_draws = draws or DrawSites()
        self.crossing_in = crossing_in
        self.crossing_out = crossing_out
        self.on_begin = on_begin
        self.state = state
        self.visible = dict(visible_modules(model))
        """The modules whose calls can be intercepted, by name."""
        self.names = {id(module): name for name, module in self.visible.items()}
        self._shared_fillers = fillers
        self._fillers = fillers or Fillers()
        self._call = call
        crossings = [crossing for crossing in (crossing_in, crossing_out) if crossing is not None]
        keys = {call.key.module for crossing in crossings for call in crossing.all_calls}
        keys |= state.others_modules
        self.modules_at_cuts = frozenset(call.key.module for crossing in crossings for call in crossing.calls)
        self._seen = [module for name, module in self.visible.items() if name in keys]

    def forward(self, value: Any) -> Any:
        """Runs the span. value: the value that crossed the cut before the span; the inputs at the first
        stage. Returns the value that crosses the cut after the span; the model's output at the last stage.
        """
        given = {INPUTS: value} if self.crossing_in is None else self.crossing_in.unpack(value, self._fillers)
        forward = _SpanForward(self, given)
        inputs = forward.inputs
        model = self.layers[0]
        if not self._seen:
            return self._call(model, inputs)
        try:
            with calls_seen(self._seen, forward.call):
                output = self._call(model, inputs)
        except _Stop:
            pass
        forward.check_calls()
        if self.crossing_out is not None:
            output = forward.crossing(self._shared_fillers)
        if forward.first_of_others is not None and _has_nan(output) and not _has_nan(value):
            raise ValueError(
                f"{forward.first_of_others} was not called in the first minibatch and is now, by code that"
                " runs on both sides of a cut, and its result crosses that cut: choose other cuts, or put a"
                " minibatch first that calls it"
            )
        return output

    def owns(self, name: str) -> bool:
        return name in self.state.parameters or name in self.state.buffers

    def stage_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in super().stage_buffers() if name in self.state.buffers]

    def held_names(self) -> set[str]:
        """Returns the span's own names and all buffers, because code outside calls may read or write any
        buffer.
        """
        return super().held_names() | {name for name, _ in self.layers[0].named_buffers()}

    def others_parameters(self) -> list[nn.Parameter]:
        own = self.state.parameters
        return [parameter for name, parameter in self.layers[0].named_parameters() if name not in own]

    def place(self, device: torch.device) -> None:
        with torch.no_grad():
            for _, parameter in self._unique_parameters():
                parameter.data = parameter.data.to(device)
        for module in self.layers[0].modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def strays(self) -> list[Tensor]:
        """Returns parameters and buffers of other stages that the stage's code reads without needing their
        values.
        """
        model = self.layers[0]
        tensors = (*model.named_parameters(), *model.named_buffers())
        return [tensor for name, tensor in tensors if name in self.state.strays]

    def _unique_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own = self.state.parameters
        return [(name, parameter) for name, parameter in super()._unique_parameters() if name in own]


def _has_nan(value: Any) -> bool:
    tensors = [tensor for tensor in taken_apart(value)[0] if isinstance(tensor, Tensor)]
    return any(bool(tensor.isnan().any()) for tensor in tensors)


class _SpanForward:
    """The state of one forward."""

    def __init__(self, stage: SpanStage, given: dict[CallKey, Any]) -> None:
        """given: the inputs, and the outputs of the calls that have ended at the first cut."""
        self.first_of_others: CallKey | None = None
        """The first call of a module in SpanState.others_modules. The module's parameters are NaN here, and
        so is the call's output.
        """
        self._stage = stage
        self._given = given
        self._counter = CallCounter(stage.names)
        crossing_in, crossing_out = stage.crossing_in, stage.crossing_out
        self._over = {} if crossing_in is None else {call.key: call for call in crossing_in.calls}
        self._wanted = {} if crossing_out is None else {call.key: call for call in crossing_out.all_calls}
        self._first = None if crossing_in is None else crossing_in.last
        self._last = None if crossing_out is None else crossing_out.last
        self._outputs: dict[CallKey, list[Any]] = {}
        self._hooked: set[int] = set()  # ids of outputs that the calls themselves have given hooks
        self.inputs = given.pop(INPUTS)
        """The inputs with which the model is called."""
        self._keep(INPUTS, self.inputs)

    def call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        key = self._counter.key_of_next(module)
        if key in self._given:
            if self._given[key] is NOT_CALLED:
                raise ValueError(
                    f"{key} is called in the forward of a stage, and was not in that of the stage before:"
                    " let something decide whether it is called that all stages have, as the inputs are"
                )
            self._counter.skip(self._over[key].calls_inside)
            over = self._over[key]
            for inner in over.hooked:
                inner_output = self._given.pop(inner.key)
                self._call_hooks(inner.key, inner_output)
                self._keep(inner.key, inner_output)
            output = self._given.pop(key)
            if self._stage.draws is not None:
                self._stage.draws.skip(key)
            if over.is_hooked:
                self._call_hooks(key, output)
            if self._stage.on_begin is not None and key == self._first:
                self._stage.on_begin()
        else:
            if self.first_of_others is None and key.module in self._stage.state.others_modules:
                self.first_of_others = key
            output = call()
        self._keep(key, output)
        if key == self._last:
            raise _Stop
        return output

    def _call_hooks(self, key: CallKey, output: Any) -> None:
        """Calls the hooks of a call that is not made, with its received output. The hooks store the output
        where later code finds it.
        """
        module = self._stage.visible[key.module]
        for handle, hook in module._forward_hooks.items():
            takes_keywords = handle in module._forward_hooks_with_kwargs
            hook(module, (), {}, output) if takes_keywords else hook(module, (), output)

    def _keep(self, key: CallKey, output: Any) -> None:
        if key in self._wanted:
            flat = self._outputs[key] = self._wanted[key].flatten(output)
            self._hooked.update(id(one) for one in flat if isinstance(one, Tensor) and one._backward_hooks)

    def check_calls(self) -> None:
        """Raises ValueError if the forward did not make a call whose output crosses, or the call at whose end
        the cut is.
        """
        missing = [key for key, value in self._given.items() if value is not NOT_CALLED]
        missing += [
            key
            for key, call in self._wanted.items()
            if key not in self._outputs and (call.crosses or key == self._last)
        ]
        if missing:
            raise ValueError(
                f"the forward ended without calling {missing[0]}, as it did in the first minibatch: layers"
                " that are dropped, or called depending on the data, must lie inside one stage, and not at"
                " its end; give the plan other cuts"
            )

    def crossing(self, fillers: Fillers | None) -> tuple[Tensor | None, ...]:
        assert self._stage.crossing_out is not None
        packed = self._stage.crossing_out.pack(self._outputs, fillers)
        for tensor in packed:
            if tensor is not None and tensor._backward_hooks and id(tensor) not in self._hooked:
                raise ValueError(
                    "code between modules registers a hook at a tensor that crosses a cut, so both sides"
                    " would call it: register it in the module that makes the tensor, or choose other cuts"
                )
        return packed
