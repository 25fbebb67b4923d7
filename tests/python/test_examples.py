"""Tests the examples that need libraries: started as a user starts them, with small models, they train. If a
library is not installed, the example's error is tested instead.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _run(folder: Path, name: str, *arguments: str, said: str = "2 stages on 2 workers") -> str:
    """Runs an example, which must print the text `said`. For a small model the planner may leave a worker
    out.
    """
    command = [sys.executable, str(_EXAMPLES / name), *arguments, "--output-dir", str(folder)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    return done.stdout


@_needs("transformers", "matplotlib")
def test_a_language_model_of_transformers_learns_text_on_two_workers(tmp_path: Path) -> None:
    sizes = ("--width", "32", "--blocks", "2", "--context", "32", "--batch-size", "4", "--minibatches", "20")
    said = _run(tmp_path, "hf_finetune.py", *sizes, "--learning-rate", "0.02", "--microbatches", "2")
    found = re.search(r"held-out loss +([\d.]+) -> ([\d.]+)", said)
    assert found is not None and float(found[2]) < float(found[1]) - 0.5
    assert (tmp_path / "model" / "config.json").is_file()


@_needs("transformers", "accelerate", "peft")
def test_adapters_of_a_frozen_model_learn_text(tmp_path: Path) -> None:
    sizes = ("--width", "32", "--blocks", "2", "--context", "32", "--batch-size", "2", "--updates", "12")
    said = _run(tmp_path, "lora.py", *sizes, "--rank", "2", said="plan for PeftModelForCausalLM")
    found = re.search(r"held-out loss +([\d.]+) -> ([\d.]+)", said)
    assert found is not None and float(found[2]) < float(found[1])
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()


@_needs("transformers", "accelerate")
def test_a_trainer_of_transformers_learns_to_count(tmp_path: Path) -> None:
    said = _run(tmp_path, "trainer.py", said="plan for LlamaForCausalLM")
    found = re.findall(r"'eval_accuracy': '?([\d.]+)", said)
    assert len(found) == 3 and float(found[-1]) > 0.9
    assert (tmp_path / "model" / "config.json").is_file()


@_needs("lightning")
def test_a_module_of_lightning_learns_text_on_two_workers(tmp_path: Path) -> None:
    sizes = ("--width", "32", "--blocks", "2", "--context", "32", "--examples", "200", "--epochs", "2")
    said = _run(tmp_path, "lightning_fit.py", *sizes)
    assert re.search(r"'val_loss': [45]\.\d+", said)
    assert (tmp_path / "last.ckpt").is_file()


@_needs("torchvision", "sklearn", "matplotlib")
def test_a_network_of_torchvision_learns_digits_on_two_workers(tmp_path: Path) -> None:
    options = ("--epochs", "1", "--batch-size", "128", "--schedule", "flush", "--microbatches", "2")
    said = _run(tmp_path, "image_classifier.py", "resnet18", *options)
    assert re.search(r"held-out accuracy +0\.\d+ on 359 images", said)


@pytest.mark.parametrize(
    ("example", "library"),
    [("hf_finetune.py", "transformers"), ("image_classifier.py", "torchvision")],
)
def test_a_missing_library_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, example: str, library: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, library, None)  # an import then fails as if it were not installed
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchvision" else find_spec(name)
    )
    # The example's module would remember that there is no torchvision. monkeypatch removes the module
    # afterwards, so that later tests import it anew.
    monkeypatch.setitem(sys.modules, "torchvision_import", ModuleType("torchvision_import"))
    monkeypatch.syspath_prepend(str(_EXAMPLES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(_EXAMPLES / example), run_name="__main__")
    assert exit_info.value.code == f"{library} is not installed: make examples brings it"
