#!/bin/sh
# Puts the schemas of Prometheus' operator and of cert-manager, as npm packages, into FOLDER
# (.cache/crd-models if none is named), for tests of the chart. Needs node and npm. Does nothing where they are.
set -eu
folder=${1:-.cache/crd-models}
[ -e "$folder/installed" ] && exit 0
command -v node >/dev/null && command -v npm >/dev/null || { echo "needs node and npm" >&2; exit 1; }
mkdir -p "$folder"
(cd "$folder" && npm install --no-audit --no-fund --no-save --prefix . \
  @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/cert-manager@6.0.0) >&2
touch "$folder/installed"
