"""Tests that the code in README, in the documents and in the package's docstring runs as it is shown. Nothing
is trained, because a run stops where it would start its processes.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan, Profile, RunResult, cli
from pipedream.launch import runner
from pipedream.model.factories import try_factories
from pipedream.profiling import profiler
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [README, *(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))]


def _page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _block_with(text: str, page: str) -> str:
    (block,) = [block for block in _blocks("python", _page(page)) if text in block]
    return block


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[Any, Any]]]:
    """Collects the (model, job options) of each run() instead of running it. The working folder is a new one,
    and profiling times one minibatch.
    """
    started: list[tuple[Any, Any]] = []

    def run_locally(model: Any, data: Any, options: Any, *_: Any) -> RunResult:
        started.append((model, options))
        return RunResult(
            losses=[0.5, 0.25],
            epoch_losses=[0.375],
            versions=[],
            samples_per_s=1.0,
            predicted_ms=None,
            measured_ms=1.0,
            bubble_share=0.0,
            bytes_sent=0,
            transports={},
            worker_pids=[],
            memory=[],
        )

    def profile(model: Any, batches: Any, loss_fn: Any = None, **_: Any) -> Profile:
        return measure(model, batches, loss_fn, minibatches=1)

    measure = profiler.profile
    monkeypatch.setattr(runner, "run_locally", run_locally)
    # The package must be patched first. It loads its attribute from the module, which must still have the
    # real function then.
    monkeypatch.setattr(pipedream, "profile", profile)
    monkeypatch.setattr(profiler, "profile", profile)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    yield started
    sys.modules.pop("train", None)


def _call(command: str, capture: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(command, comments=True)
    assert name == "pipedream"
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 0, f"{command}\n{capture.readouterr().err}"


def test_the_commands_of_their_page_run_one_after_the_other(
    runs: list[tuple[Any, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(_block_with("def make_job", "docs/command-line.md"))
    commands = [
        line
        for block in _blocks("sh", _page("docs/command-line.md"))
        for line in block.splitlines()
        if line.startswith("pipedream ")
    ]
    assert {command.split()[1] for command in commands} == {"profile", "partition", "run", "keys"}
    for command in commands:
        _call(command, capfd)
    assert [options.epochs for _, options in runs] == [3, 1]
    assert runs[0][1].plan.stages == Plan.load("plan.json").stages
    assert Path("trained.safetensors").is_file()


def test_commands_inside_the_text_of_the_documents_run(
    runs: list[tuple[Any, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    commands = {command for text in DOCUMENTS for command in re.findall(r"`(pipedream \w+ --[^`]*)`", text)}
    assert "pipedream trace --schedule 2bw --stages 4" in commands
    for command in sorted(commands):
        _call(command, capfd)


def _count_right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (outputs.argmax(1) == targets).sum(), len(targets)


def _example() -> dict[str, Any]:
    """Returns values for the names that the examples do not define."""
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    return {
        "__name__": "__main__",
        "pipedream": pipedream,
        "model": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        "train_loader": loader,
        "test_loader": loader,
        "accuracy": _count_right,
        "batches": loader,
        "loss_fn": nn.functional.cross_entropy,
        "make_optimizer": torch.optim.Adam,
    }


def test_the_training_script_of_the_readme_runs(runs: list[tuple[Any, Any]]) -> None:
    pytest.importorskip("matplotlib")
    example = _example()
    exec(_block_with("if __name__", "README.md"), example)
    ((model, options),) = runs
    assert model is example["model"]
    assert options.epochs == 3
    assert Path("trace.json").is_file()


def test_the_package_docstrings_lines_run(runs: list[tuple[Any, Any]]) -> None:
    assert pipedream.__doc__ is not None
    lines = [line.strip() for line in pipedream.__doc__.splitlines() if line.startswith("    ")]
    exec("\n".join(lines), _example())
    assert len(runs) == 1


def test_the_parameter_groups_of_their_page_can_be_made_of_every_stage() -> None:
    namespace: dict[str, Any] = {"torch": torch}
    exec(_block_with("named_parameters", "docs/running.md"), namespace)
    made: list[Any] = []

    def optimizer(named_parameters: Any) -> torch.optim.Optimizer:
        made.append(namespace["optimizer"](named_parameters))
        return made[-1]

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    stages = [[(n, p) for n, p in model.named_parameters() if n.startswith(f"{i}.")] for i in range(3)]
    try_factories(stages, optimizer, None, "cpu")
    decayed = [[len(group["params"]) for group in one.param_groups] for one in made]
    assert decayed == [[0, 2], [1, 1], [0, 2]]


def test_every_python_block_of_the_documents_is_python() -> None:
    for text in DOCUMENTS:
        for block in _blocks("python", text):
            compile(block, "a document", "exec")


class _Text(nn.Module):
    """A language model with the arguments and the output of those in transformers."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, input_ids: Any) -> SimpleNamespace:
        scores = self.head(self.embedding(input_ids))
        return SimpleNamespace(loss=nn.functional.cross_entropy(scores.flatten(0, 1), input_ids.flatten()))


def _collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([sample["input_ids"] for sample in samples])}


def _about_models(containing: str) -> str:
    (text,) = [text for text in DOCUMENTS if text.startswith("# Models")]
    (block,) = [block for block in _blocks("python", text) if containing in block]
    return block


def test_the_longest_minibatch_of_the_document_about_models_is_planned_for() -> None:
    names = {
        "dataset": [{"input_ids": [1] * length} for length in (2, 5, 3)],
        "collate": _collate,
        "batch_size": 4,
        "plan": Plan.straight(2, 2),
    }
    exec(_about_models("[longest] * batch_size"), names)
    assert names["plan"].max_shapes == {"input_ids": (4, 5)}  # type: ignore[attr-defined]


def test_few_long_texts_and_many_short_ones_of_the_document_are_planned_for_apart() -> None:
    names = {
        "dataset": [[1] * length for length in (2, 5, 3)],
        "collate": lambda samples: {"input_ids": torch.tensor(samples)},
        "tokens": 10,
        "plan": Plan.straight(2, 2),
    }
    exec(_about_models("apart=True"), names)
    apart = names["plan"].shapes_apart  # type: ignore[attr-defined]
    assert sorted(shapes["input_ids"] for shapes in apart) == [(2, 5), (5, 2)]


def test_the_model_on_the_meta_device_of_the_document_runs(runs: list[tuple[Any, Any]]) -> None:
    names = {
        "torch": torch,
        "pipedream": pipedream,
        "LlamaForCausalLM": _Text,
        "config": None,
        "loader": [_collate([{"input_ids": [1, 2]}])] * 3,
        "make_optimizer": torch.optim.Adam,
    }
    exec(_about_models('torch.device("meta")'), names)
    ((model, options),) = runs
    assert model.module is names["model"]
    assert options.output.save == os.path.abspath("trained")


def test_the_evaluation_of_the_document_runs(runs: list[tuple[Any, Any]]) -> None:
    loader = [_collate([{"input_ids": [1, 2]}])] * 3
    names = {
        "torch": torch,
        "pipedream": pipedream,
        "model": _Text(),
        "plan": Plan.straight(2, 2),
        "train_loader": loader,
        "held_out_loader": loader,
        "make_optimizer": torch.optim.Adam,
    }
    exec(_about_models("held_out_loader"), names)
    assert len(runs) == 1
    assert len(names["losses"]) == 3  # type: ignore[arg-type]


def _table_under(heading: str) -> list[list[str]]:
    """Returns the rows of the table under a heading of README, without the header row."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_front_pages_figures_are_on_record_and_their_commands_are_there() -> None:
    bench = ROOT / "bench"
    record = (bench / "system" / "README.md").read_text(encoding="utf-8")
    rows, script = _table_under("How fast"), ""
    assert len(rows) > 5
    for _, measured, command in rows:
        figures = re.findall(r"[0-9]+\.[0-9]+", measured)
        assert figures and all(re.search(rf"\b{re.escape(figure)}\b", record) for figure in figures), measured
        if command != "the same":
            script, *options = command.strip("`").removeprefix("sudo ").split()
            text = (bench / script).read_text(encoding="utf-8")
            assert all(option in text for option in options if option.startswith("--")), command
        assert (bench / script).is_file()


def _anchor(heading: str) -> str:
    """Returns a heading's anchor, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def test_every_link_between_the_documents_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if ":" in path:
                continue
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            headings = (
                re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
                if anchor
                else []
            )
            assert not anchor or anchor in map(_anchor, headings), f"{page.name} links to {target}"


def test_the_front_page_stays_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_messages_of_the_troubleshooting_page_are_messages_of_the_package() -> None:
    paths = [*sorted((ROOT / "python").rglob("*.py")), ROOT / "csrc" / "schedule" / "exclusions.cc"]
    sources = (path.read_text(encoding="utf-8") for path in paths)
    said = re.sub(r"\"\s*f?\"", "", "\n".join(sources))  # joins literals that follow each other
    messages = re.findall(r"^\| `([^`]+)`", _page("docs/troubleshooting.md"), flags=re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        for part in re.split(r"<[^>]*>|: \.\.\.", message):
            assert part.strip() in said, f"{message}: {part}"


def test_the_files_that_the_pages_about_the_inside_name_are_there() -> None:
    package = ROOT / "python" / "pipedream"
    folders = [
        ROOT,
        ROOT / "csrc",
        package,
        *(package / room for room in ("model", "splitting", "profiling")),
    ]
    pages = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs").glob("inside-*.md"))]
    named = [
        name
        for page in pages
        for name in re.findall(r"`([\w/]+\.(?:py|h|cc))`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 60
    missing = [name for name in named if not any((folder / name).is_file() for folder in folders)]
    assert missing == []
