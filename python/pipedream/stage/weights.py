"""The weight versions of one stage, bound to its modules without a copy, and the optimizer that makes them.

The core keeps K flat slots, one per live version. Each (slot, unique parameter) is one autograd leaf that
views its slot. A forward binds the modules' `_parameters` to the leaves of its version (design.md,
section 4). Parameters tied across stages follow a version rule of their own, so they have slots of their own.
Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core, optim
from pipedream.budget.offload import ResidentVersions
from pipedream.model.factories import (
    NamedParameters,
    OptimizerFactory,
    SchedulerFactory,
    build_optimizer,
    build_scheduler,
    make_masters,
)
from pipedream.model.references import Place, places_of
from pipedream.model.splitter import StageModule
from pipedream.stage.shards import Piece, keep_pieces

__all__ = ["StageOptimizer", "StageWeights", "WeightVersions", "weight_layout"]

_POISON = 0xFF  # bytes that are NaN as a float of any width


def weight_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """(bytes of one version, offset of each parameter) in a flat slot."""
    return _core.weight_layout([(name, str(p.dtype).removeprefix("torch."), p.numel()) for name, p in named])


@dataclass(slots=True)
class _Reference:
    """A place of a parameter beside the modules' tables. What a layer has put there since, it keeps."""

    container: Any
    key: Any
    where: tuple[int, Any]
    current: Any
    original: Any
    of_slot: list[Any]

    def follow(self, slot: int) -> None:
        self._put(self.of_slot[slot])

    def restore(self) -> None:
        self._put(self.original)

    def _put(self, value: Any) -> None:
        try:
            held = self.container[self.key]
        except (LookupError, AttributeError, ValueError):  # the layer took it away
            return
        if held is self.current:
            self.container[self.key] = self.current = value


class WeightVersions:
    """Some parameters of a stage in flat slots, one per version kept.

    `slots` are flat uint8 tensors; version 0 is copied into slot 0. With `resident` they are the few that
    lie in device memory, and it says which version is where: a leaf then views the place where its version
    lies, and reads as NaN while that is nowhere.
    """

    def __init__(
        self,
        stage: nn.Module,
        named: NamedParameters,
        slots: list[Tensor],
        resident: ResidentVersions | None = None,
    ) -> None:
        self.names = [name for name, _ in named]
        self._originals = [parameter for _, parameter in named]
        self._stage = stage
        self._slots = slots
        self._resident = resident
        _, offsets = weight_layout(named)

        def views(slot: Tensor) -> list[Tensor]:
            return [_view_like(slot, offset, p) for offset, p in zip(offsets, self._originals, strict=True)]

        self._views = [views(slot) for slot in slots]
        homes = self._views if resident is None else self._views[:1] * resident.num_versions
        self._leaves = [
            [_make_leaf(view.data, p) for view, p in zip(home, self._originals, strict=True)]
            for home in homes
        ]
        if resident is not None:
            self._nowhere = [_nan_like(original) for original in self._originals]
            # A function, not a method: the versions would hold themselves, and their slots.
            resident.on_move = functools.partial(_move, self._leaves, self._views, self._nowhere)
            for slot in range(1, self.num_slots):
                resident.on_move(slot, None)
            resident.write(0)
        self._bound_slot = -1
        self._find_places()
        with torch.no_grad():
            for leaf, original in zip(self._leaves[0], self._originals, strict=True):
                leaf.copy_(original)
        if resident is not None:
            resident.written(0)

    @property
    def num_slots(self) -> int:
        return len(self._leaves)

    @property
    def slots(self) -> list[Tensor]:
        """Flat, as weight_layout has them."""
        return self._slots

    def bind(self, slot: int) -> None:
        """Makes the modules read the version in the slot."""
        if self._resident is not None:
            self._resident.read(slot)
        if slot == self._bound_slot:
            return
        for container, key, leaf in self._bindings[slot]:
            container[key] = leaf
        for reference in self._references:
            reference.follow(slot)
        self._bound_slot = slot

    def unbind(self) -> None:
        """What the modules read is not known any more: the next bind() writes it."""
        self._bound_slot = -1

    def follow_new_references(self) -> None:
        """From now on also what the layers keep of the parameters since their first forward is bound."""
        known = {reference.where for reference in self._references}
        known |= {(id(container), key) for container, key, _ in self._bindings[0]}
        index_of = {id(leaf): i for leaves in self._leaves for i, leaf in enumerate(leaves)}
        for place in places_of([("", self._stage)]):
            if id(place.tensor) in index_of and place.container is not None and place.where not in known:
                known.add(place.where)
                self._references.append(self._reference(place, index_of))

    def leaves(self, slot: int) -> list[nn.Parameter]:
        return self._leaves[slot]

    def take_gradients(self, slot: int) -> list[Tensor | None]:
        """What the backwards accumulated in the slot's leaves, which give it up."""
        gradients = []
        for leaf in self._leaves[slot]:
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    def check_gradients_taken(self) -> None:
        for leaves in self._leaves:
            for name, leaf in zip(self.names, leaves, strict=True):
                if leaf.grad is not None:
                    raise ValueError(
                        f"a gradient of parameter {name!r} went to a weight version that its backward did not"
                        " read, so it was not trained with it: a layer keeps the parameter from an earlier"
                        " forward, and must read it from its attribute in each"
                    )

    def prefetch(self, slot: int) -> None:
        """The version that the next backward reads is to be in device memory by then."""
        if self._resident is not None:
            self._resident.prefetch(slot)

    def begin_update(self, read_slot: int, write_slot: int) -> None:
        """Before what writes the newest version from the one before."""
        if self._resident is not None:
            self._resident.read(read_slot)
            self._resident.write(write_slot)

    def end_update(self, write_slot: int) -> None:
        """After it."""
        if self._resident is not None:
            self.settle(write_slot)  # its home gets what is in the slot
            self._resident.written(write_slot)

    def copy_version(self, read_slot: int, write_slot: int) -> None:
        """By the leaves: a layer may have pointed them at other memory than the slot, as a recurrent one does
        with flatten_parameters()."""
        if write_slot != read_slot and self._originals:
            with torch.no_grad():
                torch._foreach_copy_([*self._leaves[write_slot]], [*self._leaves[read_slot]])

    def poison(self, slot: int) -> None:
        """Nobody may read the slot before it is written: whoever does gets NaN."""
        self.settle(slot)
        if self._resident is not None:
            self._resident.poison(slot)
        else:
            self._slots[slot].fill_(_POISON)

    def restore(self, slot: int) -> None:
        """Gives the modules their own parameters back, with the values of the version in the slot."""
        if self._resident is not None:
            self._resident.read(slot)
        with torch.no_grad():
            for leaf, original in zip(self._leaves[slot], self._originals, strict=True):
                original.copy_(leaf)
        self.follow_new_references()  # none of them is to keep a version
        for container, key, parameter in self._own_places:
            container[key] = self._originals[parameter]
        for reference in self._references:
            reference.restore()
        self._bound_slot = -1

    def _find_places(self) -> None:
        """Where the parameters are bound, those that are tied within the stage in several places."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._originals)}
        # What is written at every bind, so that it is one short loop. Recurrent layers read their weights
        # from a list beside the table.
        tables = {id(module._parameters) for module in self._stage.modules()}
        tables |= {id(getattr(module, "_flat_weights", None)) for module in self._stage.modules()}
        self._own_places: list[tuple[Any, Any, int]] = []
        self._references: list[_Reference] = []
        found: set[tuple[int, Any]] = set()
        for place in places_of([("", self._stage)]):
            index = index_of.get(id(place.tensor))
            if index is None or place.container is None or place.where in found:
                continue
            found.add(place.where)
            if id(place.container) in tables:
                self._own_places.append((place.container, place.key, index))
            else:
                self._references.append(self._reference(place, index_of))
        self._bindings = [
            [(container, key, leaves[index]) for container, key, index in self._own_places]
            for leaves in self._leaves
        ]

    def _reference(self, place: Place, index_of: Mapping[int, int]) -> _Reference:
        """index_of: parameters by the id of what may lie in the place now."""

        def filled_with(parameters: Sequence[nn.Parameter]) -> Any:
            def replace(tensor: Tensor) -> Tensor:
                index = index_of.get(id(tensor))
                return tensor if index is None else parameters[index]

            return place.filled(replace)

        return _Reference(
            place.container,
            place.key,
            place.where,
            place.held,
            filled_with(self._originals),
            [filled_with(leaves) for leaves in self._leaves],
        )

    def settle(self, slot: int) -> None:
        """The leaves view their place in the slot again, with the contents that they have."""
        position = slot if self._resident is None else self._resident.position_of(slot)
        if position is None:
            return
        for leaf, view in zip(self._leaves[slot], self._views[position], strict=True):
            if leaf.data_ptr() != view.data_ptr():
                view.copy_(leaf.data)
                leaf.data = view


class StageWeights:
    """The versions of a stage's own parameters, and of those tied to other stages."""

    def __init__(
        self,
        stage: StageModule,
        own_slots: list[Tensor],
        tied: Mapping[int, tuple[Sequence[nn.Parameter], list[Tensor]]] | None = None,
        resident: ResidentVersions | None = None,
    ) -> None:
        """tied: by owner, the parameters of it that the stage has, and their slots. resident: where own_slots
        hold only some of the own versions at a time."""
        by_owner = dict(tied or {})
        shared = [parameter for parameters, _ in by_owner.values() for parameter in parameters]
        self.own = WeightVersions(stage, split_tied(stage, shared)[0], own_slots, resident)
        self.tied = {
            owner: WeightVersions(stage, split_tied(stage, parameters)[1], slots)
            for owner, (parameters, slots) in by_owner.items()
        }

    def bind(self, own_slot: int, tied_slots: Mapping[int, int]) -> None:
        """tied_slots: by owner."""
        self.own.bind(own_slot)
        for owner, slot in tied_slots.items():
            # Another stage of this worker may share the very modules, and have bound them.
            self.tied[owner].unbind()
            self.tied[owner].bind(slot)

    def follow_new_references(self) -> None:
        for versions in self._all:
            if versions.num_slots > 1:  # else all versions have the same leaves
                versions.follow_new_references()

    def check_gradients_taken(self) -> None:
        """When all updates are done. Raises ValueError for a gradient that was in none."""
        for versions in self._all:
            versions.check_gradients_taken()

    @property
    def has_parameters(self) -> bool:
        return any(versions.names for versions in self._all)

    @property
    def _all(self) -> list[WeightVersions]:
        return [self.own, *self.tied.values()]


def split_tied(
    stage: StageModule, tied: Sequence[nn.Parameter]
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The stage's trainable parameters: (its own, those among `tied`, in the order of `tied`)."""
    position = {id(parameter): index for index, parameter in enumerate(tied)}
    named = stage.trainable_parameters()
    own = [(name, parameter) for name, parameter in named if id(parameter) not in position]
    shared = [(name, parameter) for name, parameter in named if id(parameter) in position]
    return own, sorted(shared, key=lambda entry: position[id(entry[1])])


def _view_like(slot: Tensor, offset: int, original: Tensor) -> Tensor:
    num_bytes = original.numel() * original.element_size()
    flat = slot[offset : offset + num_bytes].view(original.dtype)
    # The strides of the original too: kernels choose by them (channels_last), and so do their roundings.
    view = (
        flat.as_strided(original.shape, original.stride())
        if _is_dense(original)
        else flat.view(original.shape)
    )
    # .data: a tensor with a version counter of its own. Plain views share their base's, and writing one
    # slot would make the backward of another fail falsely.
    return view.data


def _move(
    leaves: list[list[nn.Parameter]],
    views: list[list[Tensor]],
    nowhere: list[Tensor],
    slot: int,
    position: int | None,
) -> None:
    # The leaf stays the same object, so the gradients of its graphs go on adding up in it. Graphs hold none
    # of its memory: offload.py's hooks see to that.
    for leaf, view in zip(leaves[slot], nowhere if position is None else views[position], strict=True):
        leaf.data = view


def _nan_like(original: Tensor) -> Tensor:
    """One NaN that looks like a tensor of the original's shape."""
    return torch.full((), float("nan"), dtype=original.dtype, device=original.device).expand(original.shape)


def _make_leaf(view: Tensor, original: nn.Parameter) -> nn.Parameter:
    leaf = nn.Parameter(view)
    leaf.__dict__.update(original.__dict__)  # marks such as `no_weight_decay`
    return leaf


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from first to last without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class StageOptimizer:
    """Makes version v + 1 from version v and a minibatch's gradients.

    A native optimizer writes it in one pass. Any torch optimizer works on master parameters that are
    pointed at a copy of v in the new slot. Made before the slots are, because its state has a place there.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        named: NamedParameters,
        lr_scheduler: SchedulerFactory | None = None,
        where: str = "the stage",
    ) -> None:
        """named: the parameters that this stage updates, with their initial values. where: "stage 1", for
        errors of the factories."""
        self._named = list(named)
        self._masters = make_masters(named)
        # A stage without parameters has nothing to optimize, and torch refuses an empty list.
        self.optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        if self._masters:
            self.optimizer = build_optimizer(factory, [name for name, _ in named], self._masters, where)
            if lr_scheduler is not None:
                self._scheduler = build_scheduler(lr_scheduler, self.optimizer, where)
        self._native = self._native_one()

    def keep(self, pieces: Sequence[Piece]) -> None:
        """From now on it makes versions of these pieces of its parameters alone: `named` are they, in order.
        Before any state has a place."""
        self._masters = keep_pieces(self.optimizer, self._masters, pieces)
        names = [self._named[piece.parameter][0] for piece in pieces]
        self._named = list(zip(names, self._masters, strict=True))
        self._native = self._native_one()

    def _native_one(self) -> optim.NativeOptimizer | None:
        """The optimizer, where it can write the next version in one pass. Exactly: a subclass may have a step
        of its own."""
        if (
            isinstance(self.optimizer, optim.NativeOptimizer)
            and type(self.optimizer) in (optim.SGD, optim.Adam, optim.AdamW)
            and self._keeps_order(self.optimizer)
        ):
            return self.optimizer
        return None

    @property
    def layout_bytes(self) -> int:
        """Of a flat slot with all that it makes versions of, as place_state has them."""
        return weight_layout(self._named)[0]

    @property
    def num_parameters(self) -> int:
        """Tensors that it makes versions of."""
        return len(self._named)

    @property
    def is_native(self) -> bool:
        """Whether it writes the next version in one pass, without memory of torch's but for scalars."""
        return self._native is not None

    @property
    def num_placed_states(self) -> int:
        """State tensors per parameter that place_state wants memory for."""
        return 0 if self._native is None else self._native.num_state_tensors

    def place_state(self, slots: Sequence[Tensor]) -> None:
        """Gives the native optimizer its state's memory: num_placed_states flat slots, as weight_layout has
        them."""
        if self._native is None or not slots:
            return
        _, offsets = weight_layout(self._named)
        for slot in slots:
            slot.zero_()

        def make(parameter_index: int, parameter: Tensor) -> list[Tensor]:
            return [_view_like(slot, offsets[parameter_index], parameter) for slot in slots]

        self._native.place_state(make)

    def torch_state_bytes(self) -> int:
        """What the optimizer keeps outside the slots of place_state, each tensor once. Of one that has such
        slots that is a number per parameter, and not counted."""
        if self.optimizer is None or self.num_placed_states:
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
        """From the leaves of version v to those of v + 1, in the order of `named`; they may be the same."""
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
        """Of as many as are given, from `first` in the order of `named` on. Only some where the optimizer
        works element by element; end_step() follows the last of a version."""
        masters = self._masters[first : first + len(read)]
        if self.optimizer is None or not masters:
            return
        if len(masters) == len(self._masters):  # spares the plain step a context manager
            self._step(self.optimizer, masters, read, write, gradients, gradient_scale)
            return
        with _having_only(self.optimizer, masters):
            self._step(self.optimizer, masters, read, write, gradients, gradient_scale)

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
            self._step_through_masters(optimizer, masters, read, write, gradients, gradient_scale)

    def end_step(self) -> None:
        """All of a version has been made."""
        if self.optimizer is not None and self._scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a native step is not step()
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
            if gradient_scale != 1.0:
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
        # A factory may sort parameters into groups; the native step takes them in the given order. Hooks
        # belong to step().
        listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return listed == [id(p) for p in self._masters] and not hooked


@contextlib.contextmanager
def _having_only(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Meanwhile the optimizer has no other parameters than these of its own."""
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
