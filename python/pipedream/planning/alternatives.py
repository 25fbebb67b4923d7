"""What else could be run than a plan: how long a minibatch takes with each. Pure; any thread; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Stage

__all__ = ["compare", "model_parallel_ms"]


def compare(
    profile: Profile,
    num_workers: int,
    straight: tuple[Stage, ...],
    minibatch_ms: Callable[[tuple[Stage, ...]], float],
    one_at_a_time_ms: Callable[[tuple[Stage, ...]], float],
) -> dict[str, float]:
    """Milliseconds per minibatch of the alternatives. straight: the best plan of one replica per stage, which
    model parallelism runs too, one minibatch at a time."""
    last_layer = profile.num_layers - 1
    return {
        "one_worker": minibatch_ms((Stage(0, last_layer),)),
        "data_parallel": minibatch_ms((Stage(0, last_layer, num_workers),)),
        "model_parallel": one_at_a_time_ms(straight),
        "straight": minibatch_ms(straight),
    }


def model_parallel_ms(profile: Profile, boundary_ms: Sequence[float]) -> float:
    """By the paper's figures: all layers one after the other, and every boundary both ways."""
    return profile.compute_ms + sum(boundary_ms)
