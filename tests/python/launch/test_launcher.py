"""task_files.py and launcher.py: what is written for the workers, and what they are told by another way."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan
from pipedream.launch import launcher
from pipedream.links.keys import CurveKeys
from pipedream.worker.task_files import GraphReader, GraphWriter, read_part, write_data, write_part
from torch import nn
from torch.nn.utils import parametrizations

_SECRET = "s" * 40


class _TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.arange(4))


class _Device:
    """Stands in for a GPU: says that every storage lies there but those that were copied from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[torch.UntypedStorage] = []
        monkeypatch.setattr(torch.UntypedStorage, "device", property(self._device_of))
        monkeypatch.setattr(torch.UntypedStorage, "cpu", self._cpu_of())

    def _device_of(self, storage: torch.UntypedStorage) -> torch.device:
        is_copy = storage._cdata in [copy._cdata for copy in self.copies]
        return torch.device("cpu") if is_copy else torch.device("cuda", 0)

    def _cpu_of(self) -> Callable[[torch.UntypedStorage], torch.UntypedStorage]:
        def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            self.copies.append(torch.UntypedStorage(list(storage)))
            return self.copies[-1]

        return cpu


def test_what_lies_on_a_device_is_written_as_it_is_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pickle alone says where a tensor lay, and every worker would make it there anew.
    model = _TiedPair()
    with monkeypatch.context() as patch:
        device = _Device(patch)
        write_part(tmp_path, "model", model, "")
    assert len(device.copies) == 4  # the tied weight once
    rebuilt = pickle.loads((tmp_path / "model.pickle").read_bytes())
    assert rebuilt.second.weight is rebuilt.first.weight
    assert isinstance(rebuilt.first.weight, nn.Parameter)
    for name, value in model.state_dict().items():
        assert torch.equal(rebuilt.state_dict()[name], value), name


def test_data_and_functions_are_written_from_host_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [(torch.ones(2), torch.zeros(2))]
    with monkeypatch.context() as patch:
        device = _Device(patch)
        write_part(tmp_path, "loss_fn", nn.CrossEntropyLoss(weight=torch.ones(3)), "")
        assert len(device.copies) == 1
        with GraphWriter(tmp_path) as graph:
            assert write_data(graph, tmp_path, data, None) is None  # type: ignore[arg-type]
    assert len(device.copies) == 3
    assert torch.equal(pickle.loads((tmp_path / "task.pickle").read_bytes())[0][0], torch.ones(2))


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("forwards", [False, True])
def test_no_secret_key_is_in_a_file(monkeypatch: pytest.MonkeyPatch, forwards: bool) -> None:
    # A caller that is killed used to leave it in the folder of the run.
    files: dict[str, bytes] = {}
    tasks: list[Any] = []
    links: list[Any] = []

    def launch(task: Any, *_: object) -> None:
        tasks.append(task)
        folder = Path(task.folder)
        files.update({path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        with GraphReader(folder) as graph:
            links.append(graph.read("options").links)
        raise _StoppedError

    monkeypatch.setattr(launcher, "_launch", launch)
    batches = [(torch.ones(1, 1), torch.ones(1, 1))]
    with pytest.raises(_StoppedError):
        pipedream.run(
            nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
            Plan.straight(2, 2),
            data=iter(batches) if forwards else batches,
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            keys=CurveKeys("p" * 40, _SECRET, ("p" * 40,)),
            progress=False,
        )
    assert {"task.pickle", "owner"} <= files.keys()
    assert not any(_SECRET.encode() in content for content in files.values())
    (task,) = tasks
    assert task.keys.secret == _SECRET  # by the pipe through which a process gets its arguments
    assert _SECRET not in repr(task)
    assert links[0].bind_host == "127.0.0.1" and links[0].keys is None
    assert not os.path.exists(task.folder)


def test_parametrized_modules_reach_the_workers(tmp_path: Path) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    parametrizations.orthogonal(model[1])
    write_part(tmp_path, "model", model, "")
    read = read_part(tmp_path, "model")
    value = torch.randn(4, 3)
    assert torch.equal(read(value), model(value))
    assert [name for name, _ in read.named_parameters()] == [name for name, _ in model.named_parameters()]
