"""A script that changes settings, globals and functions under its `if __name__ == "__main__"` guard. Its
losses must be the same in local workers, under torchrun and in a plain loop. Each such change is called an
oddity, and the oddities of a group are made in one run.

    python odd_script.py results.json [NAME ...]     without names: all oddities of each group
"""

# mypy: ignore-errors

import argparse
import contextlib
import functools
import json
import os
import sys
import types
from dataclasses import dataclass

import numpy as np
import odd_parts
import pipedream
import torch
import torch.nn.functional as F
from odd_parts import Gate, Plain
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

SCALE = 1.0
CONFIG = {"shift": 0.0}
GAINS = [1.0]
ROW = np.ones(8)
MASK = None
TEACHER = None
DECAY = 0.0
UNIT = "none"
NOISE = 0.0
activation = torch.tanh
rescale = functools.partial(torch.mul, other=1.0)
_MISSING = object()


with open(f"{sys.argv[1]}.imports", "a") as _file:
    print(os.getpid(), file=_file)


@dataclass
class Settings:
    power: int = 1


SETTINGS = Settings()


class NotDecayed(nn.Parameter):
    """Parameters without weight decay."""


def squash(value):
    return value


class Block(nn.Linear):
    """Reads each thing that the script sets."""

    gain = 1.0

    @property
    def share(self):
        return 1.0

    def forward(self, value):
        value = rescale(super().forward(value)) * self.share * SCALE + CONFIG["shift"]
        value = self.mix(value) * self.gain * sum(GAINS) * torch.from_numpy(ROW).to(value.dtype)
        value = squash(activation(value)) ** SETTINGS.power
        return value if MASK is None else value * MASK

    def mix(self, value):
        return value

    def doubled(self, module, inputs, output):
        return output * 2


class Scale(nn.Module):
    """A layer of the script's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, value):
        return self.weight * value


class Net(nn.Module):
    """A model that is cut along its own forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(8, 8), Gate(8, 8), Plain(8, 8)
        self.d, self.e = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, value):
        return self.e(value + self.d(self.c(self.b(self.a(value)))))


def plain():
    """Returns the model of a script that changes nothing."""
    return nn.Sequential(Scale(), nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 3))


def chain():
    """Returns a list of layers."""
    return nn.Sequential(Block(8, 8), Gate(8, 8), Plain(8, 8), nn.Linear(8, 3))


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.values = torch.randn(24, 8, generator=generator)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index] + NOISE, index % 3


def loss_fn(outputs, targets, missing=_MISSING):
    assert missing is _MISSING
    loss = F.cross_entropy(outputs, targets)
    return loss if TEACHER is None else loss + (outputs - TEACHER(targets)).square().mean()


def make_optimizer(named_parameters):
    groups = {True: [], False: []}
    for _, parameter in named_parameters:
        groups[isinstance(parameter, NotDecayed)].append(parameter)
    kept = [{"params": groups[True]}, {"params": groups[False], "weight_decay": DECAY}]
    return torch.optim.SGD([group for group in kept if group["params"]], lr=0.1)


# Each oddity returns a context. The context makes the change, gives options of run(), and undoes the change.

_ODD = {}


def odd(function):
    _ODD[function.__name__] = function
    return function


@contextlib.contextmanager
def put(holder, **values):
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield {}
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


@contextlib.contextmanager
def put_here(**values):
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield {}
    finally:
        globals().update(before)


@odd
def number_of_the_command_line(model):
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.5)
    return put_here(SCALE=parser.parse_args([]).scale)


@odd
@contextlib.contextmanager
def changed_dict(model):
    CONFIG["shift"] = 0.25
    yield {}
    CONFIG["shift"] = 0.0


@odd
@contextlib.contextmanager
def longer_list(model):
    GAINS.append(0.5)
    yield {}
    GAINS.pop()


@odd
def another_object(model):
    return put_here(SETTINGS=Settings(power=2))


@odd
def array(model):
    return put_here(ROW=np.linspace(0.5, 1.5, 8))


@odd
def tensor(model):
    return put_here(MASK=(torch.arange(8) % 3 > 0).float())


@odd
def another_function(model):
    return put_here(activation=torch.sigmoid)


@odd
def another_partial(model):
    return put_here(rescale=functools.partial(torch.mul, other=0.9))


@odd
def patched_property(model):
    return put(Block, share=property(lambda block: 1.0 / len(GAINS) + 0.1))


@odd
@contextlib.contextmanager
def forward_around_the_former(model):
    layer = next(module for module in model.modules() if type(module) is Gate)
    former = layer.forward
    layer.forward = lambda value: former(value) - 0.25
    yield {}


@odd
def attribute_of_a_class(model):
    return put(Block, gain=0.75)


@odd
def patched_class(model):
    return put(Block, mix=mixed)


def mixed(self, value):
    return value.flip(-1)


@odd
def patched_class_of_a_module(model):
    return put(Gate, forward=steeper)


def steeper(self, value):
    return F.gelu(nn.Linear.forward(self, value) * 1.5) * odd_parts.FACTOR + odd_parts.offset()


@odd
def patched_static_method(model):
    return put(Plain, gain=staticmethod(lambda value: 1.25))


@odd
def number_of_a_module(model):
    return put(odd_parts, FACTOR=1.5)


@odd
@contextlib.contextmanager
def changed_dict_of_a_module(model):
    odd_parts.TABLE["offset"] = 0.125
    yield {}
    odd_parts.TABLE["offset"] = 0.0


@odd
def patched_library(model):
    return put(F, gelu=slow_gelu)


def slow_gelu(value):
    return value * torch.sigmoid(1.702 * value)


@odd
@contextlib.contextmanager
def patched_object(model):
    layer = next(module for module in model.modules() if type(module) is Plain)
    layer.forward = types.MethodType(negated, layer)
    yield {}


def negated(self, value):
    return -type(self).forward(self, value)


@odd
@contextlib.contextmanager
def partial_of_an_object(model):
    layer = [module for module in model.modules() if type(module) is nn.Linear][-1]
    layer.forward = functools.partial(halved, layer)
    yield {}


def halved(layer, value):
    return F.linear(value, layer.weight, layer.bias) / 2


@odd
@contextlib.contextmanager
def hooks(model):
    block = next(module for module in model.modules() if type(module) is Block)
    block.register_forward_hook(block.doubled)
    block.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    yield {}


@odd
@contextlib.contextmanager
def hook_of_all_modules(model):
    handle = register_module_forward_hook(raised)
    yield {}
    handle.remove()


def raised(module, inputs, output):
    return output + 0.01 if type(module) is Gate else output


@odd
def module_of_the_loss(model):
    torch.manual_seed(9)
    return put_here(TEACHER=nn.Embedding(3, 3).requires_grad_(False))


@odd
@contextlib.contextmanager
def lambda_for_a_loss(model):
    yield {"loss_fn": lambda outputs, targets: F.cross_entropy(outputs * SCALE, targets)}


@odd
@contextlib.contextmanager
def class_of_parameters(model):
    for module in list(model.modules()):
        if getattr(module, "bias", None) is not None:
            module.bias = NotDecayed(module.bias.detach())
    with put_here(DECAY=0.5):
        yield {}


@odd
@contextlib.contextmanager
def lambdas_of_the_update(model):
    with put_here(UNIT="half"):
        rate = functools.partial(
            torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step if UNIT == "half" else 1.0
        )
        yield {"lr_scheduler": rate}


@odd
@contextlib.contextmanager
def data_that_read_a_global(model):
    with put_here(NOISE=0.5):
        yield {}


@odd
@contextlib.contextmanager
def region_of_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        yield {}


@odd
@contextlib.contextmanager
def mean_over_something_else(model):
    yield {"microbatches": 2, "weight_fn": lambda targets: (targets != 1).sum() * SCALE}


_OF_CODE = (
    *("number_of_the_command_line", "changed_dict", "longer_list", "another_object", "array", "tensor"),
    *("another_function", "another_partial", "patched_property"),
    *("attribute_of_a_class", "patched_class", "patched_class_of_a_module"),
    *("patched_static_method", "number_of_a_module", "changed_dict_of_a_module", "patched_library"),
    *("patched_object", "partial_of_an_object", "hooks", "hook_of_all_modules", "guarded_function"),
    "forward_around_the_former",  # after the oddities that patch the layer's class
)
GROUPS = {
    "nothing": (),
    "nothing in a module that is cut": (),
    "code of a model": _OF_CODE,
    "code of layers": _OF_CODE,
    "loss and data": ("module_of_the_loss", "data_that_read_a_global", "class_of_parameters", "hooks"),
    "functions": (
        "number_of_the_command_line",
        "lambda_for_a_loss",
        "lambdas_of_the_update",
        "mean_over_something_else",
    ),
    "autocast": ("region_of_autocast", "changed_dict"),
}

if __name__ == "__main__":

    def squeezed(value):
        return value / (1 + value.abs())

    @odd
    def guarded_function(model):
        return put_here(squash=squeezed)


def prepared(group, names):
    """Returns (the model, options of run(), a context that undoes the oddities)."""
    torch.manual_seed(3)
    model = {"nothing": plain, "code of layers": chain}.get(group, Net)()
    around = contextlib.ExitStack()
    options = {"loss_fn": loss_fn, "optimizer": make_optimizer}
    for name in names:
        options |= around.enter_context(_ODD[name](model))
    return model, options, around


def train(group, names):
    model, options, around = prepared(group, names)
    with around:
        plan = pipedream.Plan.straight(5 if isinstance(model, Net) else 4, 2)
        loader = torch.utils.data.DataLoader(Samples(), 6)
        if group == "nothing":
            loader = torch.utils.data.DataLoader(Samples(), 6, shuffle=True, num_workers=1)
            options |= {
                "epochs": 2,
                "optimizer": functools.partial(pipedream.optim.SGD, lr=0.1, momentum=0.9),
            }
        held_out = torch.utils.data.DataLoader(Samples(), 4, shuffle=True)
        options["validation"] = pipedream.Validation(
            held_out, {"sum": lambda o, t: (o.sum(), len(o))}, every=3
        )
        result = pipedream.run(model, plan, data=loader, schedule="flush", progress=False, **options)
    figures = [[each.minibatch, each.loss, each.metrics["sum"]] for each in result.validation]
    return result.losses, {name: value.tolist() for name, value in model.state_dict().items()}, figures


def first_loss(group, names):
    """Returns the whole model's loss, computed in this process."""
    model, options, around = prepared(group, names)
    with around, torch.no_grad():
        values, targets = next(iter(torch.utils.data.DataLoader(Samples(), 6)))
        return float(options["loss_fn"](model(values), targets))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    found = {}
    for group, all_names in GROUPS.items():
        names = [name for name in all_names if not arguments.names or name in arguments.names]
        if names or not all_names:
            losses, state, figures = train(group, names)
            found[group] = {"losses": losses, "state": state, "validation": figures}
            without = {name: first_loss(group, [other for other in names if other != name]) for name in names}
            found[group] |= {"first": first_loss(group, names), "without": without}
    if os.environ.get("RANK", "0") == "0":
        with open(arguments.results, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
