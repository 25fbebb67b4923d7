"""Chooses the layers whose gradients are pushed as factors: two small matrices whose product is the gradient.
All replicas of a stage make the same choice, layer by layer, before the run.

A layer is chosen if its factors are smaller than its gradient (the rule is in planning/factor_rule.py). The
rehearsed minibatch gives the sizes. The layer must also pass a trial: all replicas multiply the same two
matrices and must get the same bits. Different processors or numbers of threads may give different bits, and
then the weights of the replicas would drift apart. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pipedream import _core
from pipedream.budget.footprint import Footprint
from pipedream.common.units import format_bytes
from pipedream.model.factored import Factors
from pipedream.model.layers import dtype_name
from pipedream.planning.codec_choice import codec_of_pushes, pushes_factors
from pipedream.planning.factor_rule import are_smaller
from pipedream.update.factors import FactorLayer, mean_product
from pipedream.update.gradients import updated_parameters
from pipedream.worker.agreed_run import AgreedRun, wait_for

__all__ = ["FactorChoice"]

# A stage's factors are sent as one item. It has two tensors per layer, and one more that says which layers
# have factors.
_NUM_LAYERS_MAX = (_core.NUM_TENSORS_MAX - 1) // 2
_SEED = 20170712

_Said = list[tuple[str, int, int]]
"""The layers that one replica proposes: (name, largest number of rows of a factor, result of the trial)."""


class FactorChoice:
    """Chooses the layers whose gradients are pushed as factors, at this worker's stages."""

    def __init__(self, run: AgreedRun, device: torch.device, footprints: Mapping[int, Footprint]) -> None:
        """Publishes the layers that this worker proposes for its stages. footprints: by stage, what the
        rehearsal measured."""
        self._run = run
        self._footprints = footprints
        self._is_asked_for = pushes_factors(run.options.links.codec)
        self._proposed: dict[int, list[FactorLayer]] = {}
        for stage in self._own_stages():
            self._proposed[stage] = self._propose(stage)
            said: _Said = [
                (layer.name, layer.num_rows_max, _try(layer, self._num_replicas(stage), device))
                for layer in self._proposed[stage]
            ]
            run.place.rendezvous.publish(_key(stage, run.plan.replica_of(run.rank)), said)

    def of_stage(self, stage: int) -> list[FactorLayer]:
        """Returns the layers that all replicas of the stage have proposed, with equally many rows and equal
        bits of a product (_try()). stage: a stage with replicas, of this worker or another."""
        if not self._is_asked_for:
            return []
        keys = [_key(stage, replica) for replica in range(self._num_replicas(stage))]
        said = wait_for(self._run.place.rendezvous, keys, functools.partial(_nothing_said, stage))
        common = set.intersection(*({tuple(row) for row in of_replica} for of_replica in said))
        return self._layers_of(stage, {name: num_rows for name, num_rows, _ in common})

    def describe(self, stage: int, chosen: Sequence[FactorLayer]) -> str:
        """Returns a text for the log about the choice for a stage of this worker. It is empty if factors were
        not asked for."""
        if not self._is_asked_for:
            return ""
        if self._run.options.autocast is not None:
            return "; none are pushed as factors, as autocast would round them"
        names = {layer.name for layer in chosen}
        parts = [f"; {_listed(chosen) or 'none'} are pushed as factors"]
        refused = [layer for layer in self._proposed[stage] if layer.name not in names]
        if refused:
            parts.append(
                f"not {_listed(refused)}, which the replicas multiply differently (processors, threads)"
            )
        larger = [layer for layer in self._candidates(stage) if layer not in self._proposed[stage]]
        if larger:
            parts.append(f"not {_listed(larger)}, whose factors are larger")
        return ", ".join(parts)

    def enlarged(
        self,
        run: AgreedRun,
        device: torch.device,
        footprints: Mapping[int, Footprint],
        stage: int,
        layers: Sequence[FactorLayer],
    ) -> list[FactorLayer]:
        """Returns the layers with as many rows as any replica needs for a larger minibatch. layers: the
        layers chosen for the stage, which must be one of this worker's. Raises ValueError if replicas get
        different bits with that many rows."""
        if not layers:
            return []
        self._run, self._footprints = run, footprints
        rows = {layer.name: layer.num_rows_max for layer in self._candidates(stage)}
        mine = [max(layer.num_rows_max, rows.get(layer.name, 0)) for layer in layers]
        most = [max(of_layer) for of_layer in zip(*self._exchanged(stage, "rows", mine), strict=True)]
        larger = [replace(layer, num_rows_max=num) for layer, num in zip(layers, most, strict=True)]
        mine = [_try(layer, self._num_replicas(stage), device) for layer in larger]
        trials = self._exchanged(stage, "trial", mine)
        if any(trial != trials[0] for trial in trials):
            raise ValueError(
                f"the replicas of stage {stage} multiply the larger factors differently (processors,"
                " threads): leave 'factors' out of the codec of pushes"
            )
        return larger

    def _exchanged(self, stage: int, what: str, mine: list[int]) -> list[list[int]]:
        """Publishes this replica's list, and returns the lists of all replicas of the stage."""

        def key(replica: int) -> str:
            return self._run.key(f"{what} of larger {_key(stage, replica)}")

        rendezvous = self._run.place.rendezvous
        rendezvous.publish(key(self._run.plan.replica_of(self._run.rank)), mine)
        keys = [key(replica) for replica in range(self._num_replicas(stage))]
        return wait_for(rendezvous, keys, functools.partial(_nothing_said, stage))

    def _own_stages(self) -> list[int]:
        stages = [stage.stage_index for stage in self._run.own_stages()] if self._is_asked_for else []
        return [stage for stage in stages if self._num_replicas(stage) > 1]

    def _num_replicas(self, stage: int) -> int:
        return self._run.plan.stages[stage].num_replicas

    def _candidates(self, stage: int) -> list[FactorLayer]:
        schedule = self._run.schedule()
        rows = self._footprints[stage].factor_rows
        num_pieces = _core.rounds_of(schedule, stage).own_per_round
        return self._layers_of(stage, {name: num_rows * num_pieces for name, num_rows in rows.items()})

    def _propose(self, stage: int) -> list[FactorLayer]:
        if self._run.options.autocast is not None:
            return []
        codec = codec_of_pushes(self._run.options.links.codec)

        def pushed_bytes(layer: FactorLayer) -> int:
            row = (dtype_name(layer.dtype), 1, layer.weight_bytes)
            return _core.channel_bytes([row], codec)[1]

        replicas = self._num_replicas(stage)
        found = [
            layer
            for layer in self._candidates(stage)
            if are_smaller(layer.factor_bytes, layer.weight_bytes, replicas, pushed_bytes(layer))
        ]
        return found[:_NUM_LAYERS_MAX]

    def _layers_of(self, stage: int, num_rows: Mapping[str, int]) -> list[FactorLayer]:
        """Returns the layers whose names are in num_rows, in the order of the stage's parameters. num_rows:
        by name, the largest number of rows that one replica has in a round."""
        named = updated_parameters(self._run.stages[stage], self._run.ties)
        num_own = len(named) - len([tie for tie in self._run.ties if tie.stages[0] == stage])
        return [
            FactorLayer(name, index, num_rows[name], len(parameter), parameter.shape[1], parameter.dtype)
            for index, (name, parameter) in enumerate(named[:num_own])
            if name in num_rows
        ]


def _try(layer: FactorLayer, num_replicas: int, device: torch.device) -> int:
    """Returns a checksum of the bits of a product of two random matrices. The matrices have the size of the
    layer's factors, and are the same at all replicas."""
    generator = torch.Generator().manual_seed(_SEED)

    def make(width: int) -> torch.Tensor:
        return torch.randn(layer.num_rows_max, width, generator=generator, dtype=layer.dtype).to(device)

    factors = Factors(make(layer.num_outputs), make(layer.num_inputs))
    product = mean_product(dict.fromkeys(range(num_replicas), factors), num_replicas)
    bits = product.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[layer.dtype.itemsize])
    return int(bits.sum(dtype=torch.int64))


def _listed(layers: Iterable[FactorLayer]) -> str:
    return ", ".join(
        f"{layer.name!r} ({format_bytes(layer.factor_bytes)} of {layer.num_rows_max} rows for"
        f" {format_bytes(layer.weight_bytes)})"
        for layer in layers
    )


def _key(stage: int, replica: int) -> str:
    return f"factors of stage {stage}/{replica}"


def _nothing_said(stage: int, keys: list[str]) -> str:
    replicas = ", ".join(key.rpartition("/")[2].partition(" ")[0] for key in keys)
    return f"no word of the factors of stage {stage} from replicas {replicas}"
