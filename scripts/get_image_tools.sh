#!/bin/sh
# Installs what tests/deploy/test_image.py builds and runs images with, where there is no Docker: buildah,
# mmdebstrap (makes a base image without a registry) and bubblewrap. Needs root on Debian or Ubuntu.
set -eu
command -v buildah >/dev/null && command -v mmdebstrap >/dev/null && command -v bwrap >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
  { echo "needs root and Debian's apt-get; install buildah, mmdebstrap and bubblewrap by other means" >&2; exit 1; }
apt-get -q update >&2
DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
  buildah mmdebstrap bubblewrap >&2
