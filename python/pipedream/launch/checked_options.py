"""Makes the workers' options from run()'s arguments. Checks whether the arguments fit each other, the plan
and the model.

run_options.py checks each argument by itself. csrc/schedule/exclusions.cc lists the pairs of options that
exclude each other. Runs on the caller's thread, before run() starts any process.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from pipedream import _core
from pipedream.budget.offload import forced_offload
from pipedream.callbacks.steering import Steering
from pipedream.checkpoint.checkpoints import Checkpoints, checkpoints_of
from pipedream.common.checks import is_whole
from pipedream.common.cpus import usable_cpus
from pipedream.common.own_rank import is_on_several_machines, is_rank_0, under_torchrun
from pipedream.common.units import parse_size
from pipedream.data.stream import check_sizes
from pipedream.launch.run_options import check_arguments
from pipedream.links.options import make_link_options, wants_checksums
from pipedream.model.layers import Model, layers_of
from pipedream.model.precision import autocast_dtype
from pipedream.model.references import check_loss_fn
from pipedream.model.stand_ins import is_on_meta
from pipedream.planning.codec_choice import check_pairs
from pipedream.planning.job import Replication, Traits, check_together, traits_where
from pipedream.planning.partition_arguments import AUTO
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import schedule_to_run
from pipedream.planning.program import Program
from pipedream.planning.shapes import Shapes, larger_of, largest_in, largest_of
from pipedream.report.first_figures import compares_losses
from pipedream.stage.job import Continued, JobOptions, MemoryOptions, OutputOptions
from pipedream.worker.continuing import found_checkpoint, kinds_of
from pipedream.worker.devices import choose_device_type
from pipedream.worker.weight_files import check_room

__all__ = ["checked_options"]

_log = logging.getLogger("pipedream")


def checked_options(model: Model, plan: Plan, arguments: dict[str, Any], steering: Steering) -> JobOptions:
    """Returns the workers' options. Raises ValueError or TypeError for a mistake in the arguments."""
    check_arguments(**arguments)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}: use pipedream.partition(...) or Plan.load(file)")
    autocast, memory = autocast_dtype(arguments["autocast"]), arguments["memory"]
    links = make_link_options(
        codec=_codec_of(arguments, plan),
        **{name: arguments[name] for name in ("transport", "keys", "bind", "ports", "insecure")},
        peer_timeout_s=float(arguments["peer_timeout"]),
        several_machines=is_on_several_machines(),
    )
    check_pairs(links.codec, plan.num_stages)
    check_loss_fn(arguments["loss_fn"])
    schedule, microbatches = _schedule_of(arguments, plan)
    check_sizes(arguments["data"], microbatches)
    plan = _fitting(plan, arguments["data"])
    if arguments["state"] is not None:
        plan = _fitting_kinds(plan, arguments["state"].kinds)
    _check_hooks(model)
    _check_environment()
    on_meta = is_on_meta(layer for _, layer in layers_of(model))
    gather = _gather_of(arguments, on_meta=on_meta)
    as_they_are = {
        field.name: arguments[field.name] for field in fields(JobOptions) if field.name in arguments
    }
    options = JobOptions(
        **as_they_are
        | {
            "plan": plan,
            "schedule": schedule,
            "microbatches": microbatches,
            "links": links,
            "autocast": autocast,
            "replication": Replication(*(arguments[name] for name in ("sync", "staleness", "sync_every"))),
            "memory": MemoryOptions(
                None if memory is None else parse_size(memory, "memory"),
                _recompute_of(arguments["recompute"], plan),
            ),
            "output": OutputOptions(gather, _absolute(arguments["save"]), arguments["progress"]),
            "num_threads": _threads_per_worker(plan),
            "weights": _absolute(arguments["weights"]),
            "call_points": steering.points,
            "checkpoints": checkpoints_of(arguments["checkpoints"]),
            "largest_in": largest_in(data) if isinstance(data := arguments["data"], (list, tuple)) else {},
        }
    )
    check_together(_traits_of(options, arguments, on_meta=on_meta))
    if options.output.save is not None and is_rank_0():
        check_room(model, options.output.save)
    if options.state is not None:
        options.state.check(options.settings_of_state(), options.seed)
    if options.schedule != AUTO:  # with "auto" only rank 0 knows the plan
        options.schedule_options()  # this raises an error if the plan cannot have the schedule
    return options if options.checkpoints is None else _with_checkpoints(options, options.checkpoints, model)


def _traits_of(options: JobOptions, arguments: dict[str, Any], *, on_meta: bool) -> Traits:
    """Returns the traits of the run, its data and its model. A trait is a property that may exclude another;
    exclusions.cc lists the pairs."""
    data, epochs = arguments["data"], options.epochs
    traits: Traits = {} if options.schedule == AUTO else options.traits()  # only rank 0 knows an "auto" plan
    if arguments["codec"] is None:
        made_for = f"the plan was made for codec={options.plan.codec}"
        traits |= {name: made_for for name in ("push_codec", "factors") if name in traits}
    own: dict[str, tuple[bool, str | None]] = {
        "read_once": (isinstance(data, Iterator), None),
        "epochs": (epochs > 1, f"epochs is {epochs}"),
        "meta_model": (on_meta, None),
        "model_with_values": (not on_meta, None),
        "gather_all": (arguments["gather"] == "all", None),
        "weights": (arguments["weights"] is not None, None),
    }
    return traits | traits_where(own)


def _with_checkpoints(options: JobOptions, checkpoints: Checkpoints, model: Model) -> JobOptions:
    """Returns the options with the checkpoints. Rank 0, or the caller of local workers, looks for the
    checkpoint to continue from."""
    checkpoints = replace(checkpoints, path=checkpoints.folder)
    continues: Continued | None = None
    if is_rank_0():
        group_size = _core.minibatches_between_drains(options.schedule_options())
        every = None if options.validation is None else options.validation.every
        continues = found_checkpoint(checkpoints, model, group_size, every)
    if continues is not None:
        options = replace(options, plan=_fitting_kinds(options.plan, kinds_of(continues)))
    return replace(options, checkpoints=checkpoints, continues=continues)


def _schedule_of(arguments: dict[str, Any], plan: Plan) -> tuple[str | Program, int]:
    """Returns (schedule, number of microbatches). At other ranks than 0 the schedule stays "auto" until they
    get rank 0's plan."""
    schedule, microbatches = arguments["schedule"], arguments["microbatches"]
    if schedule == AUTO and not is_rank_0():
        return AUTO, microbatches
    schedule, microbatches = schedule_to_run(plan, schedule, microbatches)
    if arguments["schedule"] == AUTO:
        _log.info("schedule=%r, microbatches=%d, as the plan was made for them", schedule, microbatches)
    return schedule, microbatches


def _codec_of(arguments: dict[str, Any], plan: Plan) -> Any:
    if arguments["codec"] is not None or not plan.codec:
        return arguments["codec"]
    _log.info("codec=%s, as the plan was made for it", plan.codec)
    return plan.codec


def _gather_of(arguments: dict[str, Any], *, on_meta: bool) -> str:
    """Returns where the trained weights go. They do not go back into a model on the meta device."""
    gather: str = arguments["gather"]
    if not on_meta:
        return gather
    if gather == "rank0" and arguments["save"] is None:
        raise ValueError(
            "the model is on the meta device, where trained weights have no place: give save=FOLDER, into"
            " which each stage writes its own (pipedream.materialise(model, FOLDER) reads them), or"
            " gather='none'"
        )
    return "none"


def _absolute(path: Any) -> Any:
    """Makes a path absolute, because workers may have another working directory."""
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) else path


def _check_environment() -> None:
    """Raises an error for a mistake in an environment variable that workers read. So the mistake is found
    before any worker starts."""
    choose_device_type()
    wants_checksums()
    compares_losses()
    forced_offload()


def _fitting(plan: Plan, data: Iterable[Any]) -> Plan:
    """Returns the plan with memory for the largest minibatch, if the data are a list or a tuple."""
    if not isinstance(data, (list, tuple)):
        return plan
    if plan.shapes_apart:
        return plan.fitting(*data, apart=True)
    return replace(plan, max_shapes=largest_of(data, plan.max_shapes))


def _fitting_kinds(plan: Plan, kinds: Sequence[Shapes]) -> Plan:
    """Returns the plan with memory for the shapes of an earlier run. Without it this run would have to drain
    and plan again when a minibatch of such a shape comes."""
    if plan.shapes_apart:
        return replace(plan, shapes_apart=tuple(kinds))
    return replace(plan, max_shapes=functools.reduce(larger_of, kinds, plan.max_shapes))


def _recompute_of(recompute: Any, plan: Plan) -> tuple[bool, ...] | None:
    if recompute is None:
        return None
    if isinstance(recompute, bool):
        return (recompute,) * plan.num_stages
    if isinstance(recompute, str) or not isinstance(recompute, Iterable):
        raise ValueError(f"recompute is {recompute!r}: use True, False, or a list of stages such as [0, 1]")
    stages = list(recompute)
    for stage in stages:
        if not is_whole(stage) or not 0 <= stage < plan.num_stages:
            raise ValueError(f"recompute names stage {stage!r}: the plan has 0 to {plan.num_stages - 1}")
    return tuple(stage in stages for stage in range(plan.num_stages))


def _check_hooks(model: Model) -> None:
    for layer_name, layer in layers_of(model):
        for name, parameter in layer.named_parameters():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ValueError(
                    f"parameter {name!r} of layer {layer_name!r} has a hook, which would not see the"
                    " gradients of the weight versions: remove it, or do its work in the optimizer"
                )


def _threads_per_worker(plan: Plan) -> int:
    """Returns the number of torch threads per worker. The workers of this machine share its cores."""
    if under_torchrun():
        return torch.get_num_threads()  # torchrun or the user has set it
    return max(1, min(torch.get_num_threads(), usable_cpus() // plan.workers_used))
