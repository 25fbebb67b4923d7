"""The part of the model that a worker has in memory on its device: its own stages', of a spare the one that
it has a shard of.

    place()              what is on meta gets its initial values, tensor by tensor; all goes to the device
    leave_out_others()   from here on parameters of other stages, which only code outside module calls can
                         reach, are stand-ins of NaN: what reads one shows in the loss, and nobody trains with
                         a value that is never updated
    take_back_others()   the user's again; those on meta still are
    give_back()          to where the user has the model

On the worker's compute thread.
"""

from __future__ import annotations

import contextlib

import torch

from pipedream.model.boundary import device_of
from pipedream.model.initial_weights import materialise_some
from pipedream.model.stand_ins import poisoned
from pipedream.worker.agreed_run import AgreedRun

__all__ = ["OwnPart"]


class OwnPart:
    def __init__(self, run: AgreedRun, device: torch.device) -> None:
        self._stages = run.held_stages_of(run.rank)
        self._run = run
        self._device = device
        self._returns = run.place.returns_model
        self._given_on = torch.device("cpu")
        self._others = contextlib.ExitStack()

    def place(self) -> None:
        roots = list({id(root): (name, root) for s in self._stages for name, root in s.roots()}.values())
        names = {name for stage in self._stages for name in stage.held_names()}
        materialise_some(roots, names, self._run.options.weights, self._run.base_seed)
        given_on = device_of(self._stages)
        self._given_on = torch.device("cpu") if given_on.type == "meta" else given_on
        for stage in self._stages:
            stage.place(self._device)

    def leave_out_others(self) -> None:
        own = {id(p) for s in self._stages for _, p in (*s.trainable_parameters(), *s.frozen_parameters())}
        others = {id(p): p for stage in self._stages for p in stage.others_parameters() if id(p) not in own}
        strays = [tensor for stage in self._stages for tensor in stage.strays()]
        self._others.enter_context(poisoned(others.values(), self._device, strays))

    def take_back_others(self) -> None:
        self._others.close()

    def give_back(self) -> None:
        self.take_back_others()
        for stage in self._stages if self._returns else ():
            stage.place(self._given_on)
