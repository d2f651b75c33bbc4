#!/bin/sh
# Puts prometheus and promtool into FOLDER/usr/bin (.cache/prometheus if none is named), for tests and to try
# rules by hand. They come from the Debian package, which is unpacked, not installed: needs apt and dpkg, but
# no root, and starts no service. Does nothing where they are there already.
set -eu
folder=${1:-.cache/prometheus}
[ -x "$folder/usr/bin/promtool" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
  { echo "needs Debian's apt-get and dpkg-deb; install prometheus by other means" >&2; exit 1; }
mkdir -p "$folder"
download=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$download"' EXIT
chmod 755 "$download"
(cd "$download" &&
  apt-get -q -o Acquire::Retries=0 -o Acquire::http::Timeout=15 download prometheus) >&2
dpkg-deb -x "$download"/prometheus_*.deb "$download/unpacked"
# promtool last: whoever finds it finds the other, too
mkdir -p "$folder/usr/bin"
mv "$download/unpacked/usr/bin/prometheus" "$folder/usr/bin/prometheus"
mv "$download/unpacked/usr/bin/promtool" "$folder/usr/bin/promtool"
