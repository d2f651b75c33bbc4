#!/bin/sh
# Puts prometheus, promtool, prometheus-alertmanager and amtool into FOLDER/usr/bin (.cache/prometheus if none is
# named), for tests and to try rules by hand. They come from Debian packages, which are unpacked, not installed:
# needs apt and dpkg, but no root, and starts no service. Does nothing where they are there already.
set -eu
folder=${1:-.cache/prometheus}
programs="prometheus prometheus-alertmanager amtool promtool"
missing=
for program in $programs; do [ -x "$folder/usr/bin/$program" ] || missing=yes; done
[ "$missing" ] || exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
  { echo "needs Debian's apt-get and dpkg-deb; install prometheus by other means" >&2; exit 1; }
mkdir -p "$folder/usr/bin"
download=$(mktemp -d "$folder/download.XXXXXX")
trap 'rm -rf "$download"' EXIT
chmod 755 "$download"
(cd "$download" &&
  apt-get -q -o Acquire::Retries=0 -o Acquire::http::Timeout=15 download \
    prometheus prometheus-alertmanager) >&2
for package in "$download"/*.deb; do dpkg-deb -x "$package" "$download/unpacked"; done
alertmanager=$folder/usr/lib/prometheus-alertmanager
mkdir -p "$alertmanager"
cp -r "$download/unpacked/usr/share/prometheus" "$alertmanager/share"
mv "$download/unpacked/usr/bin/prometheus-alertmanager" "$alertmanager/program"
cat >"$download/unpacked/usr/bin/prometheus-alertmanager" <<'END'
#!/bin/sh
# Debian's build reads its templates from /usr/share/prometheus: put there for this process alone.
own=$(cd "$(dirname "$0")/../lib/prometheus-alertmanager" && pwd)
exec unshare --map-root-user --mount sh -c '
  own=$1 && shift
  mount -t tmpfs tmpfs /usr/share && cp -r "$own/share" /usr/share/prometheus && exec "$own/program" "$@"
' sh "$own" "$@"
END
chmod 755 "$download/unpacked/usr/bin/prometheus-alertmanager"
# promtool last: whoever finds it finds the others, too
for program in $programs; do mv "$download/unpacked/usr/bin/$program" "$folder/usr/bin/$program"; done
