"""Decides which weights' gradients replicas push as factors (docs/parameter-server.md), by the rule below.

A round is the work between two updates of the stage. W is the weight's bytes, F the bytes of one replica's
factors in a round, r the number of replicas. A replica sends in a round:

    dense       2 (r - 1) / r  W       gradients to the owners of shards, new versions to the other replicas
    factors     (r - 1)  F             its factors to each other replica

So factors are smaller if r F < 2 W. They also cost time: the update of each replica computes the gradient
from the factors of all r replicas, by one matrix product. The backward skips its product for this gradient.

If the profile has not measured the product, planning estimates its time: half of the layer's backward, times
the weight's share of the layer's parameters. A linear layer's backward has two products of equal size, and
this is one of them.

Planning applies the rule to every weight whose factors are in the profile. A run applies it to its first
minibatch (update/factors.py). Pure; any thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.units import format_bytes
from pipedream.planning.codec_choice import DIRECTIONS, NO_CODEC, parse_codec

if TYPE_CHECKING:
    from pipedream.planning.layer_profile import LayerProfile, Profile
    from pipedream.planning.plan_stage import Stage

__all__ = [
    "FACTORED_FIELDS",
    "FACTOR_CODEC",
    "FactoredSum",
    "are_smaller",
    "check_has_factors",
    "checked_codec",
    "core_factors",
    "describe_factored",
    "factored_figures",
    "factored_sum",
    "split_codec",
]

FACTORED_FIELDS = ("num_weights", "weight_bytes", "factor_bytes")
"""The figures of a stage in `factored` of a plan's `predicted`."""

FACTOR_CODEC = {"pushes": "factors"}
"""The codec that pushes gradients as factors, in the form that run() accepts and a plan stores."""


def are_smaller(
    factor_bytes: float, weight_bytes: float, num_replicas: int, pushed_bytes: float | None = None
) -> bool:
    """Whether a weight's factors have fewer bytes than the gradient and the new version, which replicas would
    send otherwise.

    factor_bytes: size of one replica's factors in a round. pushed_bytes: size of the gradient as a codec
    encodes it; None: no codec encodes it.
    """
    dense_bytes = weight_bytes + (weight_bytes if pushed_bytes is None else pushed_bytes)
    return num_replicas * factor_bytes < dense_bytes


class FactoredSum(NamedTuple):
    """Sums over the weights of a stage whose gradients replicas push as factors."""

    num_weights: int = 0
    weight_bytes: float = 0.0
    factor_bytes: float = 0.0
    """Bytes of one replica's factors in a round."""
    product_ms: float = 0.0
    """Milliseconds per minibatch of the matrix products that the backward skips and the update computes."""


def factored_sum(layers: Sequence[LayerProfile], num_replicas: int, *, minibatches: float = 1) -> FactoredSum:
    """Returns the sums for a stage of these layers. minibatches: minibatches that one replica trains per
    round.
    """
    found = FactoredSum()
    if num_replicas == 1:
        return found
    for layer in layers:
        for weight, product_ms in zip(layer.factors or (), _products_ms(layer), strict=True):
            of_round = minibatches * weight.factor_bytes
            if are_smaller(of_round, weight.weight_bytes, num_replicas):
                found = FactoredSum(
                    found.num_weights + 1,
                    found.weight_bytes + weight.weight_bytes,
                    found.factor_bytes + of_round,
                    found.product_ms + product_ms,
                )
    return found


def core_factors(profile: Profile, layers_ms: Sequence[float]) -> list[list[tuple[float, float, float]]]:
    """Returns for each layer a list with (weight bytes, factor bytes, seconds of the product) for each of its
    weights, as the core takes them. The list of layers is empty if the profile has no factors.

    layers_ms: each layer's time, as it is passed to the core. The products of a layer are scaled down if
        their sum exceeds that time.
    """
    if not any(layer.factors for layer in profile.layers):
        return []
    rows = []
    for layer, layer_ms in zip(profile.layers, layers_ms, strict=True):
        weights = layer.factors or ()
        products_ms = _products_ms(layer)
        scale = min(1.0, layer_ms / sum(products_ms)) if sum(products_ms) > 0 else 1.0
        rows.append(
            [
                (float(weight.weight_bytes), float(weight.factor_bytes), scale * product_ms / 1e3)
                for weight, product_ms in zip(weights, products_ms, strict=True)
            ]
        )
    return rows


def split_codec(codec: Any, *, has_limit: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Splits a codec in two: the codec that the plan is made for, as checked_codec() returns it, and the
    codecs of activations and gradients.

    has_limit: whether memory is limited. Then the plan reserves room for encoded activations and gradients.
    Without a limit their codecs would change nothing in the plan, so checked_codec() refuses them.
    """
    if not has_limit:
        return checked_codec(codec), {}
    choice = parse_codec(codec)
    crossing = {where: choice.pop(where) for where in DIRECTIONS if where in choice}
    return checked_codec(choice), crossing


def check_has_factors(profile: Profile) -> None:
    """Raises ValueError if the profile has no factors."""
    if not any(layer.factors for layer in profile.layers):
        raise ValueError(
            "factors are asked for, and the profile has none: profile the model anew, or it has no fully"
            " connected layers"
        )


def checked_codec(codec: Any) -> dict[str, str]:
    """Returns the codec that a plan is made for: {} or FACTOR_CODEC. Raises ValueError for any other mapping,
    and TypeError for a value that is neither a mapping nor None.
    """
    refusal = (
        f"codec is {codec!r}: plans are made for {FACTOR_CODEC}, or without; give another one to run, plan"
        " for what it saves by giving more bandwidth, and with memory=... for the room that one of"
        " activations and gradients takes"
    )
    if codec is not None and not isinstance(codec, Mapping):
        raise TypeError(refusal)
    given = {where: name for where, name in (codec or {}).items() if name not in (None, NO_CODEC)}
    if not given:
        return {}
    if given != FACTOR_CODEC:
        raise ValueError(refusal)
    return dict(FACTOR_CODEC)


def factored_figures(profile: Profile, stages: Sequence[Stage]) -> list[dict[str, float]]:
    """Returns each stage's FACTORED_FIELDS, for a plan's `predicted`."""
    found = [
        factored_sum(profile.layers[stage.first_layer : stage.last_layer + 1], stage.num_replicas)
        for stage in stages
    ]
    return [{name: getattr(one, name) for name in FACTORED_FIELDS} for one in found]


def describe_factored(figures: Sequence[Mapping[str, float]]) -> str:
    """Describes the figures of factored_figures() in one line for a person."""
    parts = [
        f"stage {index} pushes {format_bytes(int(row['factor_bytes']))} in the place of"
        f" {format_bytes(int(row['weight_bytes']))}"
        for index, row in enumerate(figures)
        if row["num_weights"]
    ]
    what = ", ".join(parts) or "no stage pushes factors, as none has replicas whose factors are smaller"
    return f"for codec={FACTOR_CODEC}, which run takes from the plan: {what}"


def _products_ms(layer: LayerProfile) -> list[float]:
    """Returns for each weight the milliseconds of the product that computes its gradient from one replica's
    factors. The times are scaled down if their sum exceeds the layer's backward, which was measured
    separately.
    """
    weights = layer.factors or ()
    own_bytes = max(layer.parameter_bytes, sum(weight.weight_bytes for weight in weights), 1)
    products_ms = [
        layer.backward_ms / 2 * weight.weight_bytes / own_bytes
        if weight.product_ms is None
        else weight.product_ms
        for weight in weights
    ]
    if sum(products_ms) <= layer.backward_ms:
        return products_ms
    return [layer.backward_ms * product_ms / sum(products_ms) for product_ms in products_ms]
