#!/usr/bin/env bash
# Builds, tests and measures on a GPU machine without a network, by running gpu_check.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PIPEDREAM_PYTHON:-python3}" tools/gpu_check.py "$@"
