"""The optimizer of a stage: it makes version v + 1 of the weights from version v and a minibatch's gradients.

Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core, optim
from pipedream.checkpoint.snapshot import decode, encode, on_host
from pipedream.checkpoint.stage_files import AVERAGE
from pipedream.model.factories import (
    NamedParameters,
    OptimizerFactory,
    SchedulerFactory,
    build_optimizer,
    build_scheduler,
    make_masters,
)
from pipedream.model.seeding import seed_torch, update_seed
from pipedream.optim.master_weights import has_master, master_dtype
from pipedream.update.averages import Averages
from pipedream.update.piece_states import cut_out, joined_states, whole_name
from pipedream.update.shards import Piece, keep_pieces
from pipedream.update.weights import masters_layout, state_layout, view_like

__all__ = ["StageOptimizer"]

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # keys of a parameter group; CyclicLR has the last two

# Attributes of schedulers. Each is a list with one entry per parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "max_lrs", "base_momentums", "max_momentums")


class StageOptimizer:
    """Makes version v + 1 from version v and a minibatch's gradients.

    A native optimizer writes version v + 1 in one pass. For any other torch optimizer, version v is copied
    into the new slot, and the step updates the copy in place. Construct this object before the slots, because
    the slots also hold the optimizer's state."""

    def __init__(
        self,
        factory: OptimizerFactory,
        named: NamedParameters,
        lr_scheduler: SchedulerFactory | None = None,
        where: str = "the stage",
    ) -> None:
        """named: the parameters that this stage updates, with their initial values. where: names the stage in
        errors, for example "stage 1"."""
        self.named: NamedParameters = list(named)
        """The parameters or pieces that this object updates, with the names under which their state is
        stored."""
        self._masters = make_masters(named)
        # A stage without parameters has nothing to optimize, and torch refuses an empty list.
        self.optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._where = where
        self._knows_delay = isinstance(factory, functools.partial) and "delay" in factory.keywords
        """Whether the factory gets the stage's delay, so that the options may depend on the plan."""
        self._made_with: list[dict[str, Any]] = []
        """The options of the optimizer's groups, as they were when the user's factory returned."""
        if self._masters:
            self.optimizer = build_optimizer(factory, [name for name, _ in named], self._masters, where)
            self._made_with = [_options_of(group) for group in self.optimizer.param_groups]
            if lr_scheduler is not None:
                self._scheduler = build_scheduler(lr_scheduler, self.optimizer, where)
        self._native = self._native_one()
        self.averages: Averages | None = None
        """The averages of the versions that this object makes."""
        self._draws: int | None = None
        self._num_steps = 0

    def draw_by_name(self, base: int, stage_index: int) -> None:
        """Seeds the random draws of each of the optimizer's steps. The seed follows from the run's seed
        `base`, the stage, the names of its parameters and the number of the step. Without this call the draws
        come from the process's generators."""
        self._draws = update_seed(base, stage_index, [name for name, _ in self.named])

    def keep(self, pieces: Sequence[Piece]) -> None:
        """Restricts this object to these pieces of its parameters. It then updates no other elements, and
        `named` lists the pieces in order. Call it before place_state()."""
        self._masters = keep_pieces(self.optimizer, self._masters, pieces)
        names = [
            f"{self.named[piece.parameter][0]}[{piece.first}:{piece.first + piece.count}]" for piece in pieces
        ]
        self.named = list(zip(names, self._masters, strict=True))
        self._native = self._native_one()

    def _native_one(self) -> optim.NativeOptimizer | None:
        """Returns the optimizer if it can write the next version in one pass, and None otherwise. A subclass
        does not count, because its step may differ."""
        if (
            isinstance(self.optimizer, optim.NativeOptimizer)
            and type(self.optimizer) in optim.NATIVE_OPTIMIZERS
            and self._keeps_order(self.optimizer)
        ):
            return self.optimizer
        return None

    @property
    def num_parameters(self) -> int:
        return len(self.named)

    @property
    def is_native(self) -> bool:
        """Whether the optimizer writes the next version in one pass. Such a step allocates no tensors of
        torch except for scalars."""
        return self._native is not None

    @property
    def num_placed_states(self) -> int:
        """The number of state tensors per parameter for which place_state() needs memory."""
        return 0 if self._native is None else self._native.num_state_tensors

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of a flat slot that holds one state tensor per parameter."""
        return state_layout(self.named)[0]

    @property
    def num_placed_masters(self) -> int:
        """The number of slots that place_state() needs for float32 masters: 1 if any parameter has one."""
        return int(self._native is not None and any(has_master(p) for _, p in self.named))

    @property
    def keeps_masters(self) -> bool:
        """Whether any parameter has a float32 master, in a slot or elsewhere."""
        keeps = self.is_native or isinstance(self.optimizer, optim.MasterWeights)
        return keeps and any(has_master(parameter) for _, parameter in self.named)

    @property
    def masters_slot_bytes(self) -> int:
        """Bytes of a flat slot with the masters of all parameters."""
        return masters_layout(self.named)[0]

    def place_state(self, states: Sequence[Tensor], masters: Sequence[Tensor] = ()) -> None:
        """Gives the native optimizer flat slots for its state: num_placed_states slots laid out as by
        state_layout(), and num_placed_masters slots laid out as by masters_layout()."""
        if self._native is None or not (states or masters):
            return
        _, offsets = state_layout(self.named)
        _, master_offsets = masters_layout(self.named)
        for slot in states:
            slot.zero_()

        def make(index: int, parameter: Tensor) -> list[Tensor]:
            dtype = master_dtype(parameter.dtype)
            placed = [view_like(slot, offsets[index], parameter, dtype) for slot in states]
            if has_master(parameter):
                placed += [view_like(slot, master_offsets[index], parameter, dtype) for slot in masters]
            return placed

        self._native.place_state(make)

    def leave_slots(self) -> None:
        """Takes the optimizer out of its slots, because memory is planned again and gives other slots. A
        native optimizer copies its state out, and place_state() then moves it into the new slots. Other
        optimizers keep no state in slots, but their masters are views of a slot."""
        if self._native is not None:
            self._native.displace_state()
            return
        for master in self._masters:  # the next step makes the master a view of a slot again
            master.data = torch.empty_like(master.data)

    def state(
        self, to_host: Callable[[Tensor], Tensor] = on_host
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns (tensors, JSON) of the state that the next steps depend on, in the form of StageSnapshot.
        to_host: copies a tensor. Raises ValueError for state that cannot be stored."""
        tensors: dict[str, Tensor] = {}
        document: dict[str, Any] = {"num_steps": self._num_steps, "optimizer": None, "scheduler": None}
        if self.averages is not None:
            values = self.averages.named_values()
            tensors |= {f"{name}{AVERAGE}": to_host(value) for name, value in values.items()}
            document["averaged"] = self.averages.count
        if self.optimizer is None:
            return tensors, document
        name_of = self._names_by_index()
        content = self.optimizer.state_dict()
        named_state = {name_of.get(key, key): value for key, value in content.pop("state").items()}
        groups = content.pop("param_groups")
        document["optimizer"] = {
            "class": _class_of(self.optimizer),
            "made_with": encode(self._made_with, "made with", {}),
            "parameters": [[name_of[index] for index in group["params"]] for group in groups],
            "groups": [
                encode(_options_of(group), f"group {index}", tensors, to_host)
                for index, group in enumerate(groups)
            ],
            "state": {
                name: encode(value, str(name), tensors, to_host) for name, value in named_state.items()
            },
            "others": encode(content, "others", tensors, to_host),
        }
        if self._scheduler is not None:
            if not hasattr(self._scheduler, "state_dict"):
                raise ValueError(f"the lr_scheduler of {self._where} has no state_dict()")
            document["scheduler"] = {
                "class": _class_of(self._scheduler),
                "state": encode(self._scheduler.state_dict(), "scheduler", tensors, to_host),
            }
        return tensors, document

    def go_on(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Loads the result of state(). Call it before place_state(). Raises ValueError if the state comes
        from another optimizer."""
        self._num_steps = document["num_steps"]
        if self.averages is not None:
            values = {n.removesuffix(AVERAGE): t for n, t in tensors.items() if n.endswith(AVERAGE)}
            self.averages.go_on(values, document.get("averaged", 0))
        before, scheduler = document["optimizer"], document["scheduler"]
        self._check_same("optimizer", self.optimizer, before)
        self._check_same("lr_scheduler", self._scheduler, scheduler)
        if self.optimizer is None:
            return
        name_of = self._names_by_index()
        index_of = {name: index for index, name in name_of.items()}
        listed = [
            [name_of[i] for i in group["params"]] for group in self.optimizer.state_dict()["param_groups"]
        ]
        made_with = encode(self._made_with, "made with", {})
        if listed != before["parameters"] or made_with != before["made_with"]:
            raise self._made_otherwise()
        device = self._device
        groups = [
            {**decode(options, tensors, device), "params": [index_of[name] for name in names]}
            for options, names in zip(before["groups"], before["parameters"], strict=True)
        ]
        state = {index_of.get(name, name): value for name, value in before["state"].items()}
        decoded = {key: decode(value, tensors, device) for key, value in state.items()}
        self._load({"state": decoded, "param_groups": groups, **decode(before["others"], tensors, device)})
        if scheduler is not None:
            self._scheduler.load_state_dict(decode(scheduler["state"], tensors, device))

    def go_on_from_parts(self, parts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Any]]]) -> None:
        """Loads the optimizer's state from the state() of other stages, which together had all of this
        stage's parameters. A piece of a parameter gets its part of the parameter's state. Raises ValueError
        if a state comes from another optimizer."""
        parts = [(tensors, document) for tensors, document in parts if document["optimizer"] is not None]
        if self.optimizer is None or not parts:
            return
        self._num_steps = max(document["num_steps"] for _, document in parts)
        for _, document in parts:
            self._check_same("optimizer", self.optimizer, document["optimizer"])
        self._check_same("lr_scheduler", self._scheduler, parts[0][1]["scheduler"])
        device = self._device
        states = joined_states(
            (name, decode(value, tensors, device))
            for tensors, document in parts
            for name, value in document["optimizer"]["state"].items()
        )
        options_of: dict[str, tuple[Any, Any]] = {}
        for tensors, document in parts:
            before = document["optimizer"]
            of_groups = zip(before["parameters"], before["groups"], before["made_with"], strict=True)
            for names, options, made_with in of_groups:
                known = decode(options, tensors, device), made_with
                options_of |= dict.fromkeys(map(whole_name, names), known)
        groups, state = [], {}
        listed = iter(self._names_by_index().items())
        mine = encode(self._made_with, "made with", {})
        for group, made_with in zip(self.optimizer.param_groups, mine, strict=True):
            indices = [next(listed) for _ in group["params"]]
            found = [options_of[whole] for _, name in indices if (whole := whole_name(name)) in options_of]
            if not self._knows_delay and any(made_before != made_with for _, made_before in found):
                raise self._made_otherwise()
            groups.append({**(found[0][0] if found else group), "params": [index for index, _ in indices]})
            for (index, name), master in zip(indices, group["params"], strict=True):
                if whole_name(name) in states:
                    state[index] = cut_out(states[whole_name(name)], name, master)
        others = decode(parts[0][1]["optimizer"]["others"], parts[0][0], device)
        self._load({"state": state, "param_groups": groups, **others})
        if self._scheduler is not None:
            tensors, document = parts[0]
            content = decode(document["scheduler"]["state"], tensors, device)
            self._scheduler.load_state_dict(_without_groups(content, len(groups)))
            _take_rates_of(self.optimizer, self._scheduler)

    def _made_otherwise(self) -> ValueError:
        return ValueError(
            f"state has other groups of parameters, or other options of them, than the optimizer of"
            f" {self._where} is made with: go on with the same optimizer, and change rates by an"
            " lr_scheduler or a callback"
        )

    @property
    def _device(self) -> torch.device | None:
        """The parameters' device; None without parameters. A shard may be empty, because a small stage may
        have fewer pieces than replicas."""
        return self._masters[0].device if self._masters else None

    def _check_same(self, what: str, mine: Any, before: Mapping[str, Any] | None) -> None:
        here, there = (None if mine is None else _class_of(mine)), (before or {}).get("class")
        if here != there:
            raise ValueError(
                f"{what} is {here} at {self._where}, and state is of a run with {there}: go on with the same,"
                " or start a new run"
            )

    def _load(self, content: dict[str, Any]) -> None:
        """Loads a state dict without changing dtypes. torch's load_state_dict() would cast each tensor to the
        dtype of its parameter."""
        optimizer = self.optimizer
        assert optimizer is not None
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            optimizer.load_state_dict(content)
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for group, options in zip(optimizer.param_groups, content["param_groups"], strict=True):
            group.update(_options_of(options))
        optimizer.state.clear()
        for key, value in content["state"].items():
            optimizer.state[parameters[key] if isinstance(key, int) else key] = value

    def _names_by_index(self) -> dict[int, str]:
        """Returns the name of each parameter by its number in a state_dict()."""
        assert self.optimizer is not None
        names = {id(master): name for master, (name, _) in zip(self._masters, self.named, strict=True)}
        listed = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {index: names[id(parameter)] for index, parameter in enumerate(listed)}

    def torch_state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state outside of the slots of place_state(). Each tensor
        counts once. The result is 0 for a native optimizer, which keeps only single numbers outside of the
        slots."""
        if self.optimizer is None or self.is_native:
            return 0
        tensors = {
            id(value): value.numel() * value.element_size()
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        }
        return sum(tensors.values())

    def step(
        self,
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float = 1.0,
    ) -> None:
        """Updates all parameters, from the leaves of version v to the leaves of version v + 1. Both lists are
        in the order of `named`, and may be the same list."""
        self.step_some(0, read, write, gradients, gradient_scale)
        self.end_step()

    def step_some(
        self,
        first: int,
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float = 1.0,
    ) -> None:
        """Updates as many parameters as are given, from position `first` on in the order of `named`. An
        optimizer that does not work element by element must get all parameters at once. Call end_step() after
        the last call for a version."""
        masters = self._masters[first : first + len(read)]
        if self.optimizer is None or not masters:
            return
        if len(masters) == len(self._masters):  # this usual case needs no context manager
            self._step(self.optimizer, masters, read, write, gradients, gradient_scale)
        else:
            with _having_only(self.optimizer, masters):
                self._step(self.optimizer, masters, read, write, gradients, gradient_scale)
        if self.averages is not None:
            self.averages.add(first, write)

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Sequence[nn.Parameter],
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float,
    ) -> None:
        if self._native is not None:
            self._native.step_out_of_place(read, write, gradients, gradient_scale)
        else:
            if self._draws is not None:
                seed_torch(_core.derived_seed(self._draws, self._num_steps))
                self._num_steps += 1
            self._step_through_masters(optimizer, masters, read, write, gradients, gradient_scale)

    def rates(self) -> list[float]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [float(group["lr"]) for group in groups if "lr" in group]

    def scale_rates(self, factor: float) -> None:
        """Multiplies the learning rates, and the base rates from which a scheduler computes later rates."""
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * factor
        _scale_scheduler(self._scheduler, factor)

    def end_step(self) -> None:
        """Ends a step after all parts of a version have been made: counts the version in the averages, and
        steps the scheduler."""
        if self.averages is not None:
            self.averages.end_version()
        if self.optimizer is not None and self._scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # step() itself was not called
            self._scheduler.step()

    @staticmethod
    def _step_through_masters(
        optimizer: torch.optim.Optimizer,
        masters: Sequence[nn.Parameter],
        read: Sequence[Tensor],
        write: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        gradient_scale: float,
    ) -> None:
        with torch.no_grad():
            if gradient_scale != 1.0 and any(gradient is not None for gradient in gradients):
                gradients = _without_overlaps(gradients)
                torch._foreach_mul_([g for g in gradients if g is not None], gradient_scale)
            moved = [pair for pair in zip(write, read, strict=True) if pair[0] is not pair[1]]
            if moved:
                torch._foreach_copy_([target for target, _ in moved], [source for _, source in moved])
        for master, leaf, gradient in zip(masters, write, gradients, strict=True):
            master.data = leaf.data
            master.grad = gradient
        optimizer.step()
        for master, leaf in zip(masters, write, strict=True):
            master.grad = None
            if master.data_ptr() != leaf.data_ptr():  # the optimizer replaced .data instead of writing it
                with torch.no_grad():
                    leaf.copy_(master)

    def _keeps_order(self, optimizer: torch.optim.Optimizer) -> bool:
        # The native step takes the parameters in the stage's order, but a factory may have sorted them into
        # groups in another order. The native step also does not run the hooks of step().
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return listed == [id(p) for p in self._masters] and not hooked


def _without_overlaps(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the gradients, with a copy of each gradient that overlaps an earlier one in memory. Otherwise
    work in place would change the common memory twice. Autograd gives two parameters gradients in one memory
    if their views are added."""
    apart = list(gradients)
    dense = ((g.data_ptr(), i, g) for i, g in enumerate(gradients) if g is not None and not g.is_sparse)
    end = 0
    for start, index, gradient in sorted(dense, key=operator.itemgetter(0)):
        if start < end:
            apart[index] = gradient.clone()
        end = max(end, start + gradient.nbytes)
    return apart


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    for name in ("base_lrs", "max_lrs"):  # CyclicLR has the second
        if hasattr(scheduler, name):
            setattr(scheduler, name, [rate * factor for rate in getattr(scheduler, name)])
    for part in getattr(scheduler, "_schedulers", ()):  # a chained or sequential scheduler has parts
        _scale_scheduler(part, factor)


def _without_groups(state: dict[str, Any], num_groups: int) -> dict[str, Any]:
    """Returns a scheduler's state without its lists of a value per group. Another stage has other groups."""
    kept = {name: value for name, value in state.items() if name not in _BY_GROUP}
    functions = state.get("lr_lambdas")
    if functions is not None and len(functions) != num_groups:
        kept["lr_lambdas"] = [None] * num_groups  # plain functions have no state, unlike callable objects
    if "_schedulers" in state:
        kept["_schedulers"] = [_without_groups(part, num_groups) for part in state["_schedulers"]]
    return kept


def _take_rates_of(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Gives the scheduler the rates of its optimizer's groups."""
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    if hasattr(scheduler, "_last_lr"):
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
    for part in getattr(scheduler, "_schedulers", ()):
        _take_rates_of(optimizer, part)


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@contextlib.contextmanager
def _having_only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leaves the optimizer only these parameters until the context ends."""
    groups = optimizer.param_groups
    all_of_groups = [group["params"] for group in groups]
    kept = {id(parameter) for parameter in parameters}
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
    try:
        yield
    finally:
        for group, all_of_group in zip(groups, all_of_groups, strict=True):
            group["params"] = all_of_group
