"""Tests structure.py: objects that hold values are taken apart and put together again, also in another
process."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from pipedream.model.structure import paths, rebuilt, taken_apart


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Record:
    first: Any
    second: Any = None


class Output(OrderedDict[str, Any]):
    """Imitates an output of Hugging Face's models: a dataclass, and also a dict that leaves out fields that
    are None."""


@pytest.mark.parametrize(
    "value",
    [3, None, (), (1, [2, {"a": 3}]), Pair(1, (2,)), Record(1, {"b": 2}), OrderedDict(b=1, a=2), Output(x=1)],
    ids=repr,
)
def test_a_value_is_rebuilt_as_it_was(value: Any) -> None:
    values, structure = taken_apart(value)
    again = rebuilt(pickle.loads(pickle.dumps(structure)), values)
    assert again == value
    assert type(again) is type(value)
    assert taken_apart(again) == (values, structure)


def test_other_values_in_the_same_structure_take_their_places() -> None:
    _, structure = taken_apart(Record((1, 2), [3]))
    assert rebuilt(structure, "abc") == Record(("a", "b"), ["c"])


def test_structures_differ_in_kind_length_and_keys_and_say_what_they_are() -> None:
    structures = [taken_apart(value)[1] for value in (1, (1,), [1], (1, 2), {"a": 1}, {"b": 1}, Record(1))]
    assert len(set(structures)) == len(structures)
    assert str(taken_apart({"a": (1, 2), "b": Record(3)})[1]) == (
        "dict(a: tuple(*, *), b: Record(first: *, second: *))"
    )


def test_paths_say_where_the_values_are() -> None:
    _, structure = taken_apart({"a": (1, [2]), "b": Record(3)})
    assert paths(structure) == ["['a'][0]", "['a'][1][0]", "['b'].first", "['b'].second"]
    assert paths(taken_apart(1)[1]) == [""]
