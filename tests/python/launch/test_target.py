"""Tests the TARGET of the command line: which functions are accepted, and what they may return."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipedream.launch import runner
from pipedream.launch.target import load_job

JOB = "dict(model='m', data=[1], loss_fn=len, optimizer=list)"


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Gives each test its own sys.path, and removes the modules that the test imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_file_and_function_give_the_job(tmp_path: Path) -> None:
    (tmp_path / "one_target.py").write_text(f"def make():\n    return {JOB}\n")
    job = load_job("one_target.py:make", needs_optimizer=True)
    assert (job.model, job.data, job.loss_fn, job.options) == ("m", [1], len, {"optimizer": list})


def test_module_in_the_current_folder_gives_the_job(tmp_path: Path) -> None:
    (tmp_path / "target_package").mkdir()
    (tmp_path / "target_package" / "models.py").write_text(f"def make():\n    return {JOB}\n")
    assert load_job("target_package.models:make", needs_optimizer=True).model == "m"


def test_target_file_finds_its_neighbours_and_its_classes_their_module(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "target_neighbour.py").write_text("class Model: ...\n")
    (folder / "two_target.py").write_text(
        "from types import SimpleNamespace\nfrom target_neighbour import Model\n"
        "def make():\n    return SimpleNamespace(model=Model(), data=[1], loss_fn=len)\n"
    )
    job = load_job("folder/two_target.py:make", needs_optimizer=False)
    # Worker processes inherit sys.path and import the class by this name.
    assert type(job.model).__module__ == "target_neighbour"
    assert str(folder) in sys.path
    assert job.options == {}


@pytest.mark.parametrize("target", ["file.py", ":make", "file.py:", ""])
def test_target_of_another_form_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"write path/to/file\.py:function or package\.module:function"):
        load_job(target, needs_optimizer=False)


def test_missing_file_module_and_function_are_named(tmp_path: Path) -> None:
    (tmp_path / "three_target.py").write_text("make = 3\n")
    with pytest.raises(ValueError, match=r"target file is 'gone\.py': there is no such file"):
        load_job("gone.py:make", needs_optimizer=False)
    with pytest.raises(ValueError, match="there is no module 'gone' here"):
        load_job("gone.models:make", needs_optimizer=False)
    with pytest.raises(ValueError, match=r"three_target\.py has no function 'make'"):
        load_job("three_target.py:make", needs_optimizer=False)


def test_module_that_the_target_itself_misses_is_not_called_a_wrong_target(tmp_path: Path) -> None:
    (tmp_path / "four_target.py").write_text("import gone_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="gone_dependency"):
        load_job("four_target:make", needs_optimizer=False)


def test_target_file_named_like_a_loaded_module_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(f"def make():\n    return {JOB}\n")
    with pytest.raises(ValueError, match="another module is called 'json', rename the file"):
        load_job("json.py:make", needs_optimizer=False)


@pytest.mark.parametrize("missing", ["model", "data", "optimizer"])
def test_missing_part_of_the_job_is_named(tmp_path: Path, missing: str) -> None:
    (tmp_path / "five_target.py").write_text(
        f"def make():\n    job = {JOB}\n    del job[{missing!r}]\n    return job\n"
    )
    with pytest.raises(ValueError, match=f"returned no '{missing}': it must return model, data, optimizer"):
        load_job("five_target.py:make", needs_optimizer=True)


def test_a_job_without_a_loss_trains_by_its_models_own(tmp_path: Path) -> None:
    (tmp_path / "lossless_target.py").write_text(
        "def make():\n    return dict(model='m', data=[1], optimizer=list)\n"
    )
    job = load_job("lossless_target.py:make", needs_optimizer=True)
    assert (job.loss_fn, job.options) == (None, {"optimizer": list})


def _job(tmp_path: Path, **more: object) -> str:
    _count[0] += 1
    name = f"six_target_{_count[0]}"
    (tmp_path / f"{name}.py").write_text(f"def make():\n    return {JOB} | {more!r}\n")
    return f"{name}.py:make"


_count = [0]


def test_every_argument_of_run_is_taken(tmp_path: Path) -> None:
    more = {
        name: parameter.default
        for name, parameter in inspect.signature(runner.run).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert {"epochs", "lr_scheduler", "microbatches", "gather"} <= set(more)
    job = load_job(_job(tmp_path, **more), needs_optimizer=True)
    del more["loss_fn"]  # loss_fn is a part of the job, not an option
    assert job.options == more | {"optimizer": list}


@pytest.mark.parametrize("needs_optimizer", [True, False])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr_schedulr", r"do you mean 'lr_scheduler'\?$"),
        ("epoch", r"do you mean 'epochs'\?$"),
        ("Seed", r"do you mean 'seed'\?$"),
        ("plan", r"give it with --plan FILE$"),
        ("wandb_project", r"it may return model, data, loss_fn, optimizer, epochs, "),
    ],
)
def test_what_run_does_not_take_is_refused_with_what_is_nearest(
    tmp_path: Path, name: str, remedy: str, needs_optimizer: bool
) -> None:
    target = _job(tmp_path, **{name: 3})
    with pytest.raises(ValueError, match=f"^target '{target}' returned '{name}', which .*: {remedy}"):
        load_job(target, needs_optimizer=needs_optimizer)


def test_an_object_gives_its_attributes_and_those_of_its_class_that_run_takes(tmp_path: Path) -> None:
    (tmp_path / "seven_target.py").write_text(
        "class Job:\n"
        "    epochs = 3\n"
        "    helper = 4\n"
        "    def __init__(self):\n"
        "        self.model, self.data, self._cache = 'm', [1], {}\n"
        "    def loss_fn(self, outputs, targets): ...\n"
        "def make():\n    return Job()\n"
        "def make_wrong():\n    job = Job()\n    job.sede = 1\n    return job\n"
    )
    job = load_job("seven_target.py:make", needs_optimizer=False)
    assert (job.model, job.options) == ("m", {"epochs": 3})
    with pytest.raises(ValueError, match=r"returned 'sede', which .*: do you mean 'seed'"):
        load_job("seven_target.py:make_wrong", needs_optimizer=False)
