#!/usr/bin/env bash
# Prepares a bare Debian or Ubuntu for `make test` and `make demo`. It installs a compiler, Python's headers,
# GoogleTest, a virtual environment, Python packages and pipedream. It skips what is installed already, so a second
# call is quick. As root, or with sudo, it installs missing system packages. Otherwise it names them.
#
#   PIPEDREAM_PYTHON  the Python to use (3.10 or later); default: .venv's, else python3, else the newest python3.x
#   PIPEDREAM_TORCH   pip's arguments for torch; default "torch==2.13.0". They may have options, such as
#                     "torch==2.13.0 --index-url URL". On a GPU machine use any torch >= 2.6 that fits the driver.
#   PIPEDREAM_CUDA    auto (default), on, off: whether the core is built with CUDA
#   PIPEDREAM_CUDA_ARCHS  the GPUs that the core is built for, such as "80 90" or native; default: 75 to 90, and later ones
#   PIPEDREAM_APT     no: install no system packages, only say which are missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Python may write the bytecode of imported modules, even if the environment forbids it. So each is compiled once.
unset PYTHONDONTWRITEBYTECODE

torch_requirement=${PIPEDREAM_TORCH:-torch==2.13.0}
stamps=.venv/.pipedream

say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# Only one setup runs at a time. Otherwise `make -j test demo` would install twice at once.
mkdir -p build
exec 9>build/.setup.lock
if command -v flock >/dev/null; then flock 9; fi

# A broken .venv is removed, because it must not be the Python that makes the new one, even if it is activated.
venv_works() { .venv/bin/python -m pip --version >/dev/null 2>&1; }
if ! venv_works; then rm -rf .venv; fi

# --- Python ------------------------------------------------------------------------------------------
python_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints a text that is the same for all executables of one installation, and for virtual environments made from it.
python_identity() { "$1" -c 'import sys; print(sys.base_prefix, *sys.version_info[:3])'; }

# Prints the Python to use: PIPEDREAM_PYTHON, otherwise the existing .venv's, otherwise the system's. Prints nothing if
# there is none.
find_python() {
  local candidate
  if [[ -n ${PIPEDREAM_PYTHON:-} ]]; then
    python_is_new_enough "$PIPEDREAM_PYTHON" ||
      fail "PIPEDREAM_PYTHON=$PIPEDREAM_PYTHON is not a Python 3.10 or later"
    echo "$PIPEDREAM_PYTHON"
    return
  fi
  for candidate in "$PWD/.venv/bin/python" python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null && python_is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

# --- system packages ---------------------------------------------------------------------------------
works_cxx() {
  local compiler=${CXX:-c++}
  command -v "$compiler" >/dev/null &&
    printf '#include <concepts>\n#include <compare>\nint main() {}\n' |
    "$compiler" -std=c++20 -x c++ - -o /dev/null 2>/dev/null
}
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
has_headers() {
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'
}
has_gtest() { compgen -G "/usr/include/gtest/gtest.h" >/dev/null || compgen -G "/usr/local/include/gtest/gtest.h" >/dev/null; }

as_root() {
  if [[ $(id -u) == 0 ]]; then "$@"; else sudo "$@"; fi
}
may_install() {
  [[ ${PIPEDREAM_APT:-yes} != no ]] && command -v apt-get >/dev/null || return 1
  [[ $(id -u) == 0 ]] && return 0
  command -v sudo >/dev/null || return 1
  # Ask for a password only where someone can type one.
  sudo -n true 2>/dev/null || [[ -t 0 ]]
}
apt_install() {
  say "installing $* (apt-get)"
  local options=(-y -qq --no-install-recommends -o DPkg::Lock::Timeout=300)
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@" >/dev/null 2>&1 && return 0
  # The package lists may be missing or old, so they are updated and the installation is tried again.
  as_root apt-get update -qq >/dev/null 2>&1 || true
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@" >/dev/null
}

missing_packages() {
  local python=$1 version
  works_cxx || echo g++
  if [[ -z $python ]]; then
    echo python3 python3-venv python3-dev
  else
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    has_venv "$python" || echo "$version-venv"
    has_headers "$python" || echo "$version-dev"
  fi
}

python=$(find_python)
read -r -a missing <<<"$(missing_packages "$python" | xargs)"
if ((${#missing[@]})); then
  may_install || fail "this machine lacks ${missing[*]}; run: sudo apt-get install ${missing[*]}"
  apt_install "${missing[@]}" || fail "apt-get could not install ${missing[*]}; install them, then run this again"
  python=$(find_python)
  [[ -n $python ]] || fail "no Python 3.10 or later; install one, or name it with PIPEDREAM_PYTHON"
  read -r -a missing <<<"$(missing_packages "$python" | xargs)"
  ((${#missing[@]} == 0)) || fail "still missing after apt-get: ${missing[*]}"
fi
if ! has_gtest && may_install; then
  apt_install libgtest-dev || say "libgtest-dev could not be installed: CMake will fetch GoogleTest"
fi

# --- virtual environment -----------------------------------------------------------------------------
if ! venv_works || [[ $(python_identity "$python") != "$(python_identity .venv/bin/python)" ]]; then
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
mkdir -p "$stamps"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# With --no-compile a module is compiled when it is first imported. Most of the installed modules never are.
pip_install() { pip install -q --no-compile "$@"; }

# up_to_date NAME DIGEST says whether the step NAME was done with exactly these inputs.
up_to_date() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }

requirements_digest=$({ echo "$torch_requirement"; .venv/bin/python --version; cat pyproject.toml; } | sha256sum)
if ! up_to_date requirements "$requirements_digest"; then
  say "installing Python packages into .venv ($torch_requirement first; this can take minutes)"
  pip_install --upgrade "pip>=24" "setuptools>=70" wheel "pybind11>=2.12" "cmake>=3.22" ninja
fi

# --- pipedream itself --------------------------------------------------------------------------------
# The digest is over contents, not times, so a fresh checkout of the same tree is up to date.
package_digest=$({
  echo "$requirements_digest ${PIPEDREAM_CUDA:-auto} ${PIPEDREAM_CUDA_ARCHS:-} ${CMAKE_ARGS:-} ${CXX:-}"
  find csrc python cmake third_party CMakeLists.txt setup.py pyproject.toml -type f \
    \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.py' -o -name '*.pyi' -o -name 'py.typed' \
    -o -name '*.cmake' -o -name CMakeLists.txt -o -name pyproject.toml \) -print0 |
    sort -z | xargs -0 sha256sum
} | sha256sum)

# The C++ core needs none of the other packages, so it is compiled while pip unpacks them on one CPU core. The build
# has its own process group, so that no compiler keeps running if this script fails.
if ! up_to_date package "$package_digest"; then
  say "building pipedream (C++ core in build/python)"
  rm -rf "$stamps/package" build/wheel
  log=build/install.log
  set -m
  pip wheel --no-build-isolation --no-deps --wheel-dir build/wheel . >"$log" 2>&1 &
  build=$!
  set +m
  trap 'kill -- "-$build" 2>/dev/null || true' EXIT
fi

declared_requirements() {
  .venv/bin/python - <<'EOF'
from setuptools.config.pyprojecttoml import load_file

project = load_file("pyproject.toml")["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras["dev"], *extras["demo"], *extras["docs"], sep="\n")
EOF
}
if ! up_to_date requirements "$requirements_digest"; then
  # torch is installed first, so that the requirement torch>=2.6 does not bring another build. The variable is not
  # quoted, because it may have options.
  # shellcheck disable=SC2086
  pip_install $torch_requirement
  pip_install -r <(declared_requirements)
  # These imports compile modules once, which otherwise all workers of the first training would do.
  .venv/bin/python -c 'import matplotlib.pyplot, numpy.random, sklearn.datasets, torch._dynamo, torch.distributed.run, zmq'
  echo "$requirements_digest" >"$stamps/requirements"
fi

if ! up_to_date package "$package_digest"; then
  if ! { wait "$build" && pip install --no-deps --force-reinstall build/wheel/*.whl; } >>"$log" 2>&1; then
    tail -n 60 "$log" >&2
    fail "pipedream could not be built or installed; the whole log is $log"
  fi
  trap - EXIT
  .venv/bin/python -c 'import pipedream._core' || fail "pipedream was installed but cannot be imported"
  echo "$package_digest" >"$stamps/package"
fi
say "ready: $(.venv/bin/python --version), torch $(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')"
