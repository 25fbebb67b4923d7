"""Builds pipedream._core with CMake, in a build directory that persists, so that a second install is quick.

`make test` adds the C++ tests to that directory, so that the core is compiled once for both.

In the environment, PIPEDREAM_CUDA=auto|on|off decides about the CUDA backend, PIPEDREAM_CUDA_ARCHS (such as
"80 90", or native) about the GPUs that its kernels are built for,
PIPEDREAM_WARNINGS_AS_ERRORS=ON|OFF about warnings, PIPEDREAM_BUILD_TESTS=ON|OFF about the C++ tests (both as
the directory has it when not given); CMAKE_ARGS is passed on.
Everything else is in pyproject.toml.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# One per Python: the headers, and so the objects, differ.
CMAKE_DIR = ROOT / "build" / "python" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def find_tool(name: str) -> str:
    """The pip package's executable of this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise SystemExit(f"pipedream: {name} is needed to build the C++ core; run 'pip install {name}'")
    return found


def pybind11_cmake_dir() -> str:
    """Where pybind11's CMake package is; asked again each time, as build isolation moves it."""
    if importlib.util.find_spec("pybind11") is None:
        raise SystemExit("pipedream: pybind11 is needed to build the C++ core; run 'pip install pybind11'")
    import pybind11

    return pybind11.get_cmake_dir()


def given_options() -> list[str]:
    """What only our own tests want: a compiler newer than ours may warn about more, which must not stop an
    install."""
    names = ("PIPEDREAM_WARNINGS_AS_ERRORS", "PIPEDREAM_BUILD_TESTS")
    return [f"-D{name}={os.environ[name]}" for name in names if os.environ.get(name)]


class FreshBuild(build):
    """build/setuptools keeps modules that the tree no longer has; CMake's directory is elsewhere."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = "build/setuptools"

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Runs CMake instead of a compiler."""

    def run(self) -> None:
        self.is_for_this_tree = self.inplace or self.editable_mode  # setuptools clears inplace meanwhile
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        cmake = find_tool("cmake")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(CMAKE_DIR), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPIPEDREAM_CUDA={os.environ.get('PIPEDREAM_CUDA', 'auto')}",
            "-DPIPEDREAM_BUILD_PYTHON=ON",
            *given_options(),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_cmake_dir()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        self.run_cmake(configure)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        build = [cmake, "--build", str(CMAKE_DIR), "--parallel", jobs]
        self.run_cmake([*build, "--target", "pd_bindings"])
        # A wheel's core has no symbols; that of a working tree names functions to a debugger.
        strip = [] if self.is_for_this_tree else ["--strip"]
        install = [cmake, "--install", str(CMAKE_DIR), "--component", "core", *strip]
        self.run_cmake([*install, "--prefix", str(target.parent)])
        if os.environ.get("PIPEDREAM_BUILD_TESTS") == "ON":
            # Begun here, beside the rest of an installation; a test that does not compile is make's to tell.
            subprocess.run(build, check=False)

    @staticmethod
    def run_cmake(command: list[str]) -> None:
        print("+", shlex.join(command), flush=True)
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise SystemExit(
                f"pipedream: building the C++ core failed: {command[0]} exited with {code}, see above"
            )


setup(
    ext_modules=[Extension("pipedream._core", sources=[])],
    cmdclass={"build": FreshBuild, "build_ext": CMakeBuild},
)
