"""Kills a training after each new checkpoint and starts it again. Compares the final result, byte by byte,
with that of a run that was never killed.

    python tests/faults/kill_and_resume.py              # ten kills of examples/char_lm.py, three workers
    python tests/faults/kill_and_resume.py --kills 3 --schedule flush --microbatches 4

Some of the kills come while a checkpoint is written, when its first file exists. SIGKILL goes to the process
group, so no process has time to clean up.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipedream.checkpoint.checkpoint_folder import checkpoints_in, is_complete

_ROOT = Path(__file__).resolve().parents[2]
_RESULT = "model.safetensors"
_POLL_S = 0.001
_DEADLINE_S = 600.0


def _command(options: argparse.Namespace, output: Path, checkpoints: Path) -> list[str]:
    return [
        *(sys.executable, str(_ROOT / "examples" / "char_lm.py")),
        *("--workers", str(options.workers), "--minibatches", str(options.minibatches)),
        *("--schedule", options.schedule, "--microbatches", str(options.microbatches)),
        *("--plan", options.plan, "--output-dir", str(output), "--checkpoint-dir", str(checkpoints)),
        *("--checkpoint-every", str(options.every)),
    ]


def _newest(path: Path) -> int:
    complete = [checkpoint for checkpoint in checkpoints_in(path) if is_complete(checkpoint)]
    return int(complete[-1].name.rpartition("-")[2]) if complete else 0


def _is_being_written(path: Path) -> bool:
    """Returns whether some checkpoint has a part of its files but not all."""
    return any(
        not is_complete(checkpoint) and any(checkpoint.iterdir()) for checkpoint in checkpoints_in(path)
    )


def _kill_once(command: list[str], checkpoints: Path, *, while_writing: bool) -> str:
    """Starts the command and kills it after a new checkpoint.

    Returns a text that says when it was killed, or "" if the command ended first.
    """
    before = _newest(checkpoints)
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + _DEADLINE_S
    try:
        while process.poll() is None:
            newest = _newest(checkpoints)
            if newest > before and (not while_writing or _is_being_written(checkpoints)):
                where = "while one was written" if while_writing else "after one"
                return f"killed {where}, at minibatch {newest} or later"
            if time.monotonic() > deadline_s:
                raise TimeoutError("no new checkpoint")
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        told = process.stderr.read()
    if process.returncode != 0:
        raise RuntimeError(told)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--while-writing", type=int, default=2, help="of the kills")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--plan", default="1-1-1")
    parser.add_argument("--minibatches", type=int, default=120)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--schedule", default="pipedream")
    parser.add_argument("--microbatches", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        subprocess.run(_command(options, whole, whole / "checkpoints"), check=True, stdout=subprocess.DEVNULL)
        command = _command(options, killed, killed / "checkpoints")
        for kill in range(options.kills):
            while_writing = kill < options.while_writing
            told = _kill_once(command, killed / "checkpoints", while_writing=while_writing)
            print(f"{kill + 1}: {told or 'it ended before'}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        same = (whole / _RESULT).read_bytes() == (killed / _RESULT).read_bytes()
        same = same and (whole / "losses.json").read_bytes() == (killed / "losses.json").read_bytes()
        print("the results are the same" if same else "THE RESULTS DIFFER")
        sys.exit(not same)


if __name__ == "__main__":
    main()
