"""Keeps the weight versions of one stage, and makes the stage's modules read a version without a copy.

The core has K flat slots, one per live version. For each slot and each unique parameter there is one autograd
leaf, a view of the slot. A forward binds the modules' `_parameters` to the leaves of its version
(docs/inside-memory.md). Parameters tied across stages have their own slots, because other rules say which of
their versions is read (tied.py). Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.budget.resident_versions import ResidentVersions
from pipedream.model.factories import NamedParameters, parameter_like
from pipedream.model.layers import dtype_name, shares_memory
from pipedream.model.references import Place, frozen_meanwhile, places_of
from pipedream.model.stage_module import StageModule
from pipedream.optim.master_weights import has_master, master_dtype

__all__ = [
    "StageWeights",
    "WeightVersions",
    "masters_layout",
    "split_tied",
    "state_layout",
    "view_like",
    "weight_layout",
]

_POISON = 0xFF  # bytes that are NaN as a float of any width


@dataclass(slots=True)
class _Reference:
    """A place outside of the modules' tables in which a layer stores a parameter. Each bind() also writes
    this place, until the layer itself stores something else there."""

    container: Any
    key: Any
    where: tuple[int, Any]
    current: Any
    original: Any
    of_slot: list[Any]
    filled_with: Callable[[Sequence[nn.Parameter]], Any]
    """Returns the value to store in the place, with these parameters in it."""

    def follow(self, slot: int) -> None:
        self._put(self.of_slot[slot])

    def show(self, parameters: Sequence[nn.Parameter]) -> None:
        self._put(self.filled_with(parameters))

    def restore(self) -> None:
        self._put(self.original)

    def _put(self, value: Any) -> None:
        try:
            held = self.container[self.key]
        except (LookupError, AttributeError, ValueError):  # the layer has removed the place
            return
        if held is self.current:
            self.container[self.key] = self.current = value


class WeightVersions:
    """The versions of some parameters of a stage in flat slots, one slot per version.

    `slots` are flat uint8 tensors; the parameters are copied into the newest version's slot. `resident` says
    which versions are in device memory; None if all of them are. A leaf views the memory in which its version
    lies. While the version is not in device memory, the leaf reads as NaN."""

    def __init__(
        self,
        stage: nn.Module,
        named: NamedParameters,
        slots: list[Tensor],
        resident: ResidentVersions | None = None,
        *,
        newest_slot: int = 0,
        older: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """older: by slot, the contents of all versions except the newest."""
        self.names = [name for name, _ in named]
        self._originals = [parameter for _, parameter in named]
        self._stage = stage
        self._slots = slots
        self._resident = resident
        _, self._offsets = weight_layout(named)
        self._views = [self._views_of(slot) for slot in slots]
        homes = self._views if resident is None else self._views[:1] * resident.num_versions
        self._leaves = [
            [parameter_like(p, view.data) for view, p in zip(home, self._originals, strict=True)]
            for home in homes
        ]
        if resident is not None:
            self._nowhere = [_nan_like(original) for original in self._originals]
            # _move() is a function and not a method, because a bound method would make a reference cycle that
            # keeps the slots in memory.
            resident.on_move = functools.partial(_move, self._leaves, self._views, self._nowhere)
            for slot in range(self.num_slots):
                resident.on_move(slot, None)
        self._bound_slot = -1
        self._unseen = list(range(len(self._originals)))
        """The parameters that have had no gradient yet."""
        self._sharing: set[int] = set()
        """The parameters whose gradients have shared memory with another tensor."""
        self._find_places()
        for slot, version in (older or {}).items():
            self._begin_with(slot, [version[name] for name in self.names])
        self._begin_with(newest_slot, self._originals)

    @torch.no_grad()
    def _begin_with(self, slot: int, contents: Sequence[Tensor]) -> None:
        if self._resident is not None:
            self._resident.write(slot)
        for leaf, content in zip(self._leaves[slot], contents, strict=True):
            leaf.copy_(content)
        if self._resident is not None:
            self._resident.written(slot)

    def contents(self, slot: int) -> dict[str, Tensor]:
        """Returns the leaves of the version in the slot, by parameter name. The version is in device memory
        afterwards."""
        if self._resident is not None:
            self._resident.read(slot)
        return dict(zip(self.names, self._leaves[slot], strict=True))

    def contents_at_once(self, slot_of: Mapping[int, int]) -> dict[int, dict[str, Tensor]]:
        """Returns the contents of all these versions at the same time. With offloading they lie in host
        memory, because device memory has room for a few versions only."""
        homes = None if self._resident is None else self._resident.homes

        def contents(slot: int) -> dict[str, Tensor]:
            lying = self._leaves[slot] if homes is None else self._views_of(homes[slot])
            return {name: tensor.detach() for name, tensor in zip(self.names, lying, strict=True)}

        return {version: contents(slot) for version, slot in slot_of.items()}

    def _views_of(self, slot: Tensor) -> list[Tensor]:
        pairs = zip(self._offsets, self._originals, strict=True)
        return [view_like(slot, offset, original) for offset, original in pairs]

    @property
    def num_slots(self) -> int:
        return len(self._leaves)

    @property
    def slots(self) -> list[Tensor]:
        """The flat slots, laid out as by weight_layout(). With offloading they are in device memory, and
        may be fewer than the versions."""
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

    def bind_values(self, values: Sequence[Tensor]) -> None:
        """Makes the modules read these values instead of a version, until the next bind()."""
        parameters = [
            parameter_like(original, value.to(original.dtype))
            for original, value in zip(self._originals, values, strict=True)
        ]
        for container, key, index in self._own_places:
            container[key] = parameters[index]
        for reference in self._references:
            reference.show(parameters)
        self._bound_slot = -1

    def unbind(self) -> None:
        """Makes the next bind() write its leaves into the modules, even if their version was bound last."""
        self._bound_slot = -1

    def follow_new_references(self) -> None:
        """Makes bind() also write the references to parameters that layers have stored since their first
        forward."""
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
        """Takes the gradients that backwards accumulated in the slot's leaves. Raises ValueError for a
        parameter that was frozen after the gradient was accumulated."""
        gradients: list[Tensor | None] = []
        for leaf in self._leaves[slot]:
            gradient, leaf.grad = leaf.grad, None
            if gradient is None and not leaf.requires_grad:
                raise frozen_meanwhile(self.names[len(gradients)])
            gradients.append(gradient)
        return gradients

    def move_gradients(self, from_slot: int, to_slot: int) -> None:
        """Moves the accumulated gradients to the leaves of another slot, because the next backwards add their
        gradients there."""
        for old, new in zip(self._leaves[from_slot], self._leaves[to_slot], strict=True):
            if old.grad is not None:
                gradient, old.grad = old.grad, None
                new.grad = gradient

    def separate_gradients(self, slot: int) -> None:
        """Copies gradients that share memory with another tensor. Each parameter's first gradient is checked.
        Later gradients are checked only if the parameter's first gradient shared memory."""
        leaves = self._leaves[slot]
        unseen, self._unseen = self._unseen, []
        for index in (*self._sharing, *unseen):
            gradient = leaves[index].grad
            if gradient is None:
                if index not in self._sharing:
                    self._unseen.append(index)
            elif shares_memory(gradient):
                leaves[index].grad = gradient.clone()
                self._sharing.add(index)

    def check_no_hooks(self) -> None:
        """Raises ValueError if a forward has registered a hook at a leaf of one version. The leaves of other
        versions would not have that hook."""
        for leaves in self._leaves if self.num_slots > 1 else ():
            for name, leaf in zip(self.names, leaves, strict=True):
                if leaf._backward_hooks:
                    raise ValueError(
                        f"the forward registers a hook at parameter {name!r}, which would not see the"
                        " gradients of other weight versions: do its work in the optimizer, or in a hook of"
                        " the module"
                    )

    def scale_gradients(self, slot: int, factor: float) -> None:
        for leaf in self._leaves[slot]:
            if leaf.grad is not None:
                leaf.grad = leaf.grad * factor  # a new tensor, because two gradients may share memory

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
        """Begins to fetch a version into device memory, because the next backward reads the version."""
        if self._resident is not None:
            self._resident.prefetch(slot)

    def begin_update(self, read_slot: int, write_slot: int) -> None:
        """Prepares the slots of an update, which reads the version in read_slot and writes write_slot."""
        if self._resident is not None:
            self._resident.read(read_slot)
            self._resident.write(write_slot)

    def end_update(self, write_slot: int) -> None:
        """Ends an update after its version has been written."""
        if self._resident is not None:
            # The slot is copied to host memory next, so it must have the values of the leaves.
            self.settle(write_slot)
            self._resident.written(write_slot)

    def copy_version(self, read_slot: int, write_slot: int) -> None:
        """Copies a version leaf by leaf and not as a whole slot. A layer may have pointed its leaves at
        memory outside of the slot, as a recurrent layer does with flatten_parameters()."""
        if write_slot != read_slot and self._originals:
            with torch.no_grad():
                torch._foreach_copy_([*self._leaves[write_slot]], [*self._leaves[read_slot]])

    def poison(self, slot: int) -> None:
        """Fills the slot with NaN. Nobody may read it before it is written again."""
        self.settle(slot)
        if self._resident is not None:
            self._resident.poison(slot)
        else:
            self._slots[slot].fill_(_POISON)

    def restore(self, slot: int) -> None:
        """Puts the modules' original parameters back, with the values of the version in the slot."""
        if self._resident is not None:
            self._resident.read(slot)
        with torch.no_grad():
            for leaf, original in zip(self._leaves[slot], self._originals, strict=True):
                original.copy_(leaf)
        self.follow_new_references()  # otherwise a layer might keep a leaf of a version
        for container, key, parameter in self._own_places:
            container[key] = self._originals[parameter]
        for reference in self._references:
            reference.restore()
        self._bound_slot = -1

    def _find_places(self) -> None:
        """Finds the places to which bind() writes parameters. A parameter that is tied within the stage has
        several places."""
        index_of = {id(parameter): index for index, parameter in enumerate(self._originals)}
        # bind() writes the places in these tables in one short loop. Recurrent layers read their weights from
        # the list _flat_weights, so that list counts as a table, too.
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
        """Makes the reference for a place. The place holds a tensor now. index_of: by the id() of such a
        tensor, the index of its parameter."""

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
            filled_with,
        )

    def settle(self, slot: int) -> None:
        """Points the leaves at their places in the slot again if a layer has pointed them at other memory.
        Copies their values to these places."""
        position = slot if self._resident is None else self._resident.position_of(slot)
        if position is None:
            return
        for leaf, view in zip(self._leaves[slot], self._views[position], strict=True):
            if leaf.data_ptr() != view.data_ptr():
                view.copy_(leaf.data)
                leaf.data = view

    def show(self, slot: int) -> None:
        """Points the leaves at their places in the slot again, as settle() does, but copies no values. The
        caller writes a new version there next."""
        for leaf, view in zip(self._leaves[slot], self._views[slot], strict=True):
            if leaf.data_ptr() != view.data_ptr():
                leaf.data = view


class StageWeights:
    """The versions of a stage's untied parameters, and of its parameters that are tied to other stages."""

    def __init__(
        self,
        stage: StageModule,
        own_slots: list[Tensor],
        tied: Mapping[int, tuple[Sequence[nn.Parameter], list[Tensor]]] | None = None,
        resident: ResidentVersions | None = None,
        *,
        newest_slot: int = 0,
        older: Mapping[int, Mapping[str, Tensor]] | None = None,
        older_tied: Mapping[int, Mapping[int, Mapping[str, Tensor]]] | None = None,
    ) -> None:
        """tied: by owner, the parameters that the owner shares with this stage, and their slots.
        resident: None unless own_slots hold only some of the own versions at a time.
        newest_slot, older: as for WeightVersions, for the own versions.
        older_tied: by owner, `older` for the tied versions."""
        by_owner = dict(tied or {})
        shared = [parameter for parameters, _ in by_owner.values() for parameter in parameters]
        own = split_tied(stage, shared)[0]
        self.own = WeightVersions(stage, own, own_slots, resident, newest_slot=newest_slot, older=older)
        self.tied = {
            owner: WeightVersions(
                stage, split_tied(stage, parameters)[1], slots, older=(older_tied or {}).get(owner)
            )
            for owner, (parameters, slots) in by_owner.items()
        }

    @classmethod
    def of(cls, own: WeightVersions) -> StageWeights:
        """Makes an object with these versions alone, without tied parameters."""
        made = cls.__new__(cls)
        made.own, made.tied = own, {}
        return made

    def bind(self, own_slot: int, tied_slots: Mapping[int, int]) -> None:
        """Makes the modules read these versions. tied_slots: the slot of the tied version, by owner."""
        self.own.bind(own_slot)
        for owner, slot in tied_slots.items():
            # Another stage of this worker may share the modules, and may have bound them since then.
            self.tied[owner].unbind()
            self.tied[owner].bind(slot)

    def bind_values(self, own: Sequence[Tensor], tied: Mapping[int, Sequence[Tensor]]) -> None:
        """Makes the modules read these values until the next bind(). tied: by owner."""
        self.own.bind_values(own)
        for owner, values in tied.items():
            self.tied[owner].bind_values(values)

    def follow_new_references(self) -> None:
        for versions in self._all:
            if versions.num_slots > 1:  # with one slot the leaves never change
                versions.follow_new_references()

    def check_no_hooks(self) -> None:
        for versions in self._all:
            versions.check_no_hooks()

    def check_gradients_taken(self) -> None:
        """Raises ValueError for a gradient that no update took. Call it after all updates."""
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
    """Returns the stage's trainable parameters in two lists: (all parameters not in `tied`, the parameters in
    `tied`, in the order of `tied`)."""
    position = {id(parameter): index for index, parameter in enumerate(tied)}
    named = stage.trainable_parameters()
    own = [(name, parameter) for name, parameter in named if id(parameter) not in position]
    shared = [(name, parameter) for name, parameter in named if id(parameter) in position]
    return own, sorted(shared, key=lambda entry: position[id(entry[1])])


def _move(
    leaves: list[list[nn.Parameter]],
    views: list[list[Tensor]],
    nowhere: list[Tensor],
    slot: int,
    position: int | None,
) -> None:
    # The leaf stays the same object, so backwards of older graphs still add their gradients to it. The hooks
    # in offload.py make sure that those graphs hold none of the leaf's memory.
    for leaf, view in zip(leaves[slot], nowhere if position is None else views[position], strict=True):
        leaf.data = view


def _nan_like(original: Tensor) -> Tensor:
    """Returns a tensor of the original's shape that is NaN everywhere, in the memory of one element."""
    return torch.full((), float("nan"), dtype=original.dtype, device=original.device).expand(original.shape)


def weight_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """Returns (bytes of one version, offset of each parameter) for a flat slot."""
    return _core.weight_layout([(name, dtype_name(p.dtype), p.numel()) for name, p in named])


def state_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """Returns (bytes, offset of each parameter) for a flat slot that holds one state tensor of an optimizer
    for each parameter."""
    return _core.weight_layout([(name, dtype_name(master_dtype(p.dtype)), p.numel()) for name, p in named])


def masters_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """Returns (bytes, offset of each parameter) for a flat slot that holds the masters. A parameter without a
    master takes no bytes."""
    return _core.weight_layout(
        [(name, dtype_name(master_dtype(p.dtype)), p.numel() if has_master(p) else 0) for name, p in named]
    )


def view_like(slot: Tensor, offset: int, original: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a view of the slot from byte `offset` on, with the original's shape and strides. dtype: None
    takes the original's dtype."""
    dtype = dtype or original.dtype
    flat = slot[offset : offset + original.numel() * dtype.itemsize].view(dtype)
    # Torch chooses kernels by strides (channels_last), and kernels round differently. So the view has the
    # original's strides.
    view = (
        flat.as_strided(original.shape, original.stride())
        if _is_dense(original)
        else flat.view(original.shape)
    )
    # .data makes a tensor with its own version counter. Plain views share their base's counter, so a write to
    # one slot would make the backward of a version in another slot fail.
    return view.data


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from first to last without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
