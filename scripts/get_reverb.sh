#!/bin/sh
# Puts Reverb 0.14 with TensorFlow 2.15 into a virtual environment of their own (.cache/reverb if no FOLDER is
# named), for benchmarks/against_reverb.py. They want Python 3.11 and an older NumPy than this project, so they
# stay out of its environment. PYTHON names the interpreter. About 2 GB. Does nothing where they are there already.
set -eu
folder=${1:-.cache/reverb}
[ -e "$folder/.installed" ] && exit 0
python=${PYTHON:-python3.11}
[ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))' 2>/dev/null)" = True ] ||
  { echo "needs Python 3.11 (dm-reverb 0.14 has wheels up to that one); set PYTHON" >&2; exit 1; }
[ "$(uname -sm)" = "Linux x86_64" ] ||
  { echo "needs Linux on x86-64: dm-reverb 0.14 has no other wheels" >&2; exit 1; }
"$python" -m venv --clear "$folder" >&2
"$folder/bin/python" -m pip install --quiet 'dm-reverb==0.14.0' 'tensorflow-cpu==2.15.1' 'numpy<2' psutil >&2
"$folder/bin/python" -c 'import reverb' >&2
touch "$folder/.installed"
