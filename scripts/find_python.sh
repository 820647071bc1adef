#!/bin/sh
# Prints the path of a Python that can run jllm, or says that there is none and fails.
# A candidate counts only once it has run: a pyenv shim exists for versions that are not selected,
# and Debian ships Pythons without ensurepip.

check='
import sys
if not (3, 12) <= sys.version_info[:2] <= (3, 15):  # the versions that jaxlib 0.11 is built for
    raise SystemExit(1)
import ensurepip, ssl, venv
print(sys.executable)
'

usable() {
    "$1" -c "$check" </dev/null 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit
    echo "PYTHON=$PYTHON is not a Python 3.12 to 3.15 with the venv module." >&2
    exit 1
fi

for candidate in python3.12 python3.13 python3.14 python3.15 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-5]*/bin/python; do
    usable "$candidate" && exit
done
command -v uv >/dev/null && candidate=$(uv python find --system '>=3.12,<3.16' 2>/dev/null) &&
    usable "$candidate" && exit

echo "No Python 3.12 to 3.15 with the venv module was found: install one, or name it with 'make PYTHON=/path/to/python ...'." >&2
exit 1
