#!/bin/sh
# Installs what scripts/play_pods.py runs pods with, where there is no cluster: podman, runc (crun refuses hybrid
# cgroups), and the network with names for pods. Needs root on Debian or Ubuntu.
set -eu
present=yes
for program in podman runc catatonit iptables /usr/lib/podman/netavark /usr/lib/podman/aardvark-dns; do
  command -v "$program" >/dev/null || [ -x "/usr/libexec/podman/${program##*/}" ] || present=
done
[ "$present" ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
  { echo "needs root and Debian's apt-get; install podman, runc, catatonit, netavark, aardvark-dns and iptables" >&2; exit 1; }
apt-get -q update >&2
DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends \
  podman runc catatonit netavark aardvark-dns iptables >&2
