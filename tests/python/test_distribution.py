"""Tests that the source distribution builds a wheel, and that the wheel works in an environment without this
tree.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[2]
# This is the directory in which setup.py builds the core.
_CMAKE_DIR = _TOP / "build" / "python" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"

_LAYER = {"forward_ms": 10.0, "backward_ms": 20.0, "activation_bytes": 4096, "parameter_bytes": 1 << 30}
_PROFILE = {
    "format": "pipedream.profile/1",
    "model": "two layers",
    "batch_size": 8,
    "minibatches": 1,
    "layers": [{"name": "a", **_LAYER}, {"name": "b", **_LAYER, "activation_bytes": 0}],
}

# CMake calls this script in place of the compiler. The script copies object files from this tree's build. So
# building a wheel takes only a configuration and a link.
_LAUNCHER = """#!/bin/sh
for argument; do
  case $previous in
    -o) object=$argument ;;
    -MF) dependencies=$argument ;;
  esac
  previous=$argument
done
[ -f "$PIPEDREAM_OBJECTS/$object" ] || exec "$@"
cp "$PIPEDREAM_OBJECTS/$object" "$object" && echo "$object:" >"$dependencies"
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        check=False,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    # Without --egg-base an old pipedream.egg-info in this tree would add the files that it lists.
    command = ("egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder)
    _run(sys.executable, "setup.py", "-q", *command, cwd=_TOP)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def _compiled_files() -> Iterator[str]:
    """Yields the files of this tree that were read when the core was compiled. ninja's log of dependencies
    names them.
    """
    ninja = Path(sys.executable).parent / "ninja"
    reads = False
    for line in _run(ninja, "-C", _CMAKE_DIR, "-t", "deps", cwd=_TOP).splitlines():
        if not line.startswith(" "):
            reads = line.startswith("csrc/")
        elif reads:
            path = Path(os.path.normpath(_CMAKE_DIR / line.strip()))
            if path.is_relative_to(_TOP / "csrc"):
                yield str(path.relative_to(_TOP))


@pytest.mark.slow
def test_the_source_distribution_has_every_file_that_the_core_is_compiled_from(sdist: Path) -> None:
    if not (_CMAKE_DIR / "build.ninja").exists():
        pytest.skip("the core of this tree was not compiled here")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    compiled = set(_compiled_files())
    assert "csrc/bindings/module.cc" in compiled and "csrc/base/check.h" in compiled
    assert compiled - names == set()


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_works_in_a_clean_environment(sdist: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    offline = ("--no-index", "--no-deps", "--disable-pip-version-check")
    _run(
        *(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", sdist),
        cwd=tmp_path,
        PIPEDREAM_CUDA="off",  # looking for a CUDA compiler would take longer than the whole build
        PIPEDREAM_OBJECTS=str(_CMAKE_DIR),
        PIPEDREAM_BUILD_TESTS="OFF",
        CMAKE_ARGS=f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher} -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON",
    )
    (wheel,) = tmp_path.glob("*.whl")

    clean = tmp_path / "clean"
    _run(sys.executable, "-m", "venv", "--without-pip", clean, cwd=tmp_path)
    python = clean / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", *offline, wheel)
    _run(*install, cwd=tmp_path)
    site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    # Adds this environment's packages, for the dependencies. They come after the venv's own packages, and
    # their .pth files are not read.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    code = "import pipedream, pipedream._core as core; print(pipedream.__file__, core.__file__)"
    for path in _run(python, "-I", "-c", code, cwd=tmp_path).split():
        assert Path(path).is_relative_to(site)
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(_PROFILE))
    partition = (
        clean / "bin" / "pipedream",
        "partition",
        profile,
        "--workers",
        "2",
        "--bandwidth",
        "1Gbit/s",
    )
    assert len(json.loads(_run(*partition, "--json", cwd=tmp_path, PYTHONPATH=""))["stages"]) == 2

    if shutil.which("nm"):
        (core,) = Path(site, "pipedream").glob("_core*.so")
        assert "no symbols" in _run("nm", core, cwd=tmp_path)
