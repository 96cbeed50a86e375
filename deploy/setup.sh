#!/usr/bin/env bash
# Makes the virtual environment from the hashed lock and installs the workspace's packages into it.
# Usage: setup.sh PYTHON VENV PACKAGE_FOLDER...
set -euo pipefail
python=$1 venv=$2
shift 2
export UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=hardlink
say() { printf 'setup: %s\n' "$*"; }

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
    say "Python 3.11 or 3.12 is needed, got $("$python" --version); set PYTHON=/path/to/python3.11"
    exit 1
}
[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv"; }
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip -q
# uv itself comes from the lock too, so that a uv of the machine's owner neither helps nor harms.
sed -n '/^uv==/,/^[^ ]/{/^uv==/p;/^ .*--hash/p}' requirements.lock >"$venv/uv.lock"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r "$venv/uv.lock"
uv=$venv/bin/uv
VIRTUAL_ENV=$(cd "$venv" && pwd)
export VIRTUAL_ENV
say "installing $(grep -cE '^[a-z0-9]' requirements.lock) locked packages (about 4 GB to download the first time)"
"$uv" pip install --quiet --no-deps --require-hashes --compile-bytecode -r requirements.lock
say "installing the workspace"
editable=()
for folder in "$@"; do editable+=(-e "$folder"); done
"$uv" pip install --quiet --no-deps --no-build-isolation "${editable[@]}"
say "done"
