"""The commands `pipedream checkpoint show` and `pipedream checkpoint export`. Only export imports torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from pipedream.checkpoint.checkpoint_folder import checkpoints_in, is_complete, is_pinned
from pipedream.checkpoint.manifest import MANIFEST_NAME, Manifest, Part, problems_of, read_manifest
from pipedream.command_line import JsonOption, check_output, print_result, with_notes
from pipedream.common.errors import FileFormatError
from pipedream.common.table import format_table
from pipedream.common.units import format_bytes

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(
    name="checkpoint", help="Show checkpoints, or export the model of one.", rich_markup_mode=None
)

_Path = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, or the folder of a run's checkpoints.")
]


@checkpoint_app.command("show")
def show_command(
    path: _Path,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check only the files' sizes, not their checksums.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a checkpoint, or a list of the checkpoints in a folder. Check whether their files are whole."""
    if (path / MANIFEST_NAME).exists():
        fields = _describe_checkpoint(path, quick)
        print_result(_show_checkpoint(fields), fields, as_json)
        return
    found = checkpoints_in(path)
    if not found:
        raise ValueError(f"{path} is no checkpoint and has none")
    described = [_describe_checkpoint(checkpoint, quick) for checkpoint in found]
    print_result(_show_folder(described), {"checkpoints": described}, as_json)


@checkpoint_app.command("export")
def export_command(
    path: _Path,
    output: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file to write: .safetensors, or .pt for torch.save's format."
        ),
    ],
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the averages of callbacks.EMA instead of the weights.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the model of a checkpoint into one file. Given a folder, take its newest whole checkpoint."""
    check_output(output)
    from pipedream.checkpoint.whole_model import export_checkpoint

    written = export_checkpoint(path, output, ema=ema)
    shown = (
        f"{written['tensors']} tensors ({format_bytes(written['bytes'])}) of {written['checkpoint']}"
        f" written to {written['output']}"
    )
    print_result(with_notes(shown, [f"not used: {line}" for line in written["unused"]]), written, as_json)


def _describe_checkpoint(checkpoint: Path, quick: bool) -> dict[str, Any]:
    """Returns the fields to show. "problems" has a line for each problem; it is empty if the checkpoint is
    whole."""
    if not is_complete(checkpoint):
        problem = f"{checkpoint} is not complete: it is being written, or its run ended while writing it"
        return {"path": os.fspath(checkpoint), "problems": [problem]}
    try:
        manifest = read_manifest(checkpoint)
    except FileFormatError as error:
        return {"path": os.fspath(checkpoint), "problems": [str(error)]}
    return {
        "path": os.fspath(checkpoint),
        "problems": problems_of(checkpoint, manifest, checksums=not quick),
        "written": (checkpoint / MANIFEST_NAME).stat().st_mtime,
        "bytes": manifest.num_bytes,
        "pinned": is_pinned(checkpoint),
        **manifest.to_dict(),
    }


def _show_folder(described: list[dict[str, Any]]) -> str:
    rows = [
        [
            Path(fields["path"]).name,
            str(fields.get("minibatch", "")),
            str(fields.get("epoch", "")),
            format_bytes(fields["bytes"]) if "bytes" in fields else "",
            _written(fields),
            "damaged" if fields["problems"] and "bytes" in fields else _state_of(fields),
        ]
        for fields in described
    ]
    table = format_table(["checkpoint", "minibatch", "epoch", "size", "written", "state"], rows, "<>>><<")
    return with_notes(table, [problem for fields in described for problem in fields["problems"]])


def _state_of(fields: dict[str, Any]) -> str:
    if fields["problems"]:
        return "not usable"
    return "whole, pinned" if fields["pinned"] else "whole"


def _written(fields: dict[str, Any]) -> str:
    if "written" not in fields:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields["written"]))


def _show_checkpoint(fields: dict[str, Any]) -> str:
    if "bytes" not in fields:
        return "\n".join(fields["problems"])
    manifest = read_manifest(Path(fields["path"]))
    header = manifest.header
    lines = [
        f"checkpoint      {fields['path']}",
        f"position        minibatch {header.minibatch}, epoch {header.epoch}",
        f"written         {_written(fields)}, {format_bytes(fields['bytes'])}",
        f"schedule        {_first_line(header.schedule)}, {_counted(header.microbatches, 'microbatch')}",
        f"seed            {header.seed}",
        "",
        format_table(
            ["stage", "replica", "layers", "versions", "weights", "optimizer", "other"],
            [_row_of(part, manifest) for part in manifest.parts],
            "<<<<>>>",
        ),
    ]
    notes = fields["problems"] or ["all files are whole"]
    return with_notes("\n".join(lines), [*notes, *(["pinned: `keep` never removes it"] * fields["pinned"])])


def _row_of(part: Part, manifest: Manifest) -> list[str]:
    stage = manifest.header.plan["stages"][part.stage]
    versions = sorted(file.version or 0 for file in part.of_kind("version"))
    num_weights = sum(file.bytes for file in (*part.newest_weights, *part.of_kind("frozen")))
    num_optimizer = sum(file.bytes for file in part.of_kind("optimizer"))
    num_other = sum(file.bytes for file in part.files) - num_weights - num_optimizer
    sizes = (num_weights, num_optimizer, num_other)
    return [
        str(part.stage),
        str(part.replica),
        f"{stage['first_layer']}-{stage['last_layer']}",
        ", ".join(map(str, versions)),
        *(format_bytes(num_bytes) if num_bytes else "" for num_bytes in sizes),
    ]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if "\n" not in text else "a program"
