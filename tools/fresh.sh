#!/bin/bash
# Runs README's two commands on bare Debians, as an ordinary user and as root: `make fresh`.
#
# Each Debian is made by debootstrap in a folder of its own, gets what README's apt-get line names,
# and a clone of the last commit below each home. Root's home is closed to others, as Debian makes
# it. Needs root, debootstrap and an hour or two; what is left is the logs and the table.
#
#   tools/fresh.sh [FOLDER] [RELEASE …]      by default build/fresh, bookworm and trixie
#
# COMMANDS="demo" runs one of the two only, WHO="root" as one of the two only. A machine behind a proxy hands its settings for pip and
# its own certificates on.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-build/fresh}")
shift || true
releases=${*:-bookworm trixie}
commands=${COMMANDS:-demo test}
# Root installs more than README names, so it comes last.
who=${WHO:-user root}
[ "$(id -u)" = 0 ] || { echo "make fresh needs root: it makes whole Debians"; exit 1; }
command -v debootstrap >/dev/null || { echo "on Debian: apt-get install debootstrap"; exit 1; }
packages=$(sed -n 's/^\(sudo \)\?apt-get install \(git .*\)/\2/p' README.md)
[ -n "$packages" ] || { echo "README.md names no packages of Debian"; exit 1; }
table=$folder/table.md
mkdir -p "$folder"
{
  echo "| Debian | Python | Java | as | command | result | seconds |"
  echo "|---|---|---|---|---|---|---|"
} >"$table"

# Runs a script as root with a Debian as its whole machine: mounts, processes and devices end
# with it. Its network is this machine's.
inside() { # root, script
  unshare --mount --pid --fork --kill-child bash -euc '
    root=$1
    mount --make-rprivate /
    mount --bind "$root" "$root"
    mkdir -p "$root/old"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=755 dev "$root/dev"
    for each in null zero full random urandom tty; do
      touch "$root/dev/$each"
      mount --bind "/dev/$each" "$root/dev/$each"
    done
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t tmpfs shm "$root/dev/shm"
    for each in "$root"/var/cache/fresh/*; do
      mount --bind "$2/cache/${each##*/}" "$each"
    done
    cd "$root"
    pivot_root . old
    exec chroot . bash -euc "umount -l /old; cd /; $3" </dev/null
  ' inside "$1" "$folder" "$2"
}

# What a shell of this Debian begins with, and nothing else of this machine.
environment() { # who, home
  echo "env -i HOME=$2 USER=$1 LOGNAME=$1 SHELL=/bin/bash TERM=dumb"
  echo "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
  echo "PIP_CACHE_DIR=/var/cache/fresh/$1"
  env | grep -E '^(PIP_CERT|PIP_INDEX_URL|https?_proxy|no_proxy)=' || true
}

run() { # release, who, home, command
  local root=$folder/$1 log=$folder/$1-$2-$4.log began result status=0
  began=$(date +%s)
  as=$([ "$2" = root ] || echo "setpriv --reuid=$2 --regid=$2 --init-groups")
  inside "$root" "cd $3/penstock; exec $as $(environment "$2" "$3" | tr '\n' ' ') make $4" \
    >"$log" 2>&1 || status=$?
  result=$(grep -oE '[0-9]+ (passed|failed|error|skipped)[^=]* in [0-9.]+s' "$log" |
    sed 's/ in [0-9.]*s//' | paste -sd ';' || true)
  [ "$status" = 0 ] && result="passes${result:+: $result}" || result="**fails ($status)**: $result"
  python=$(inside "$root" "python3 -V" | cut -d' ' -f2)
  java=$(inside "$root" "java -version 2>&1" | sed -n 's/.*version "\([^"]*\).*/\1/p')
  echo "| $1 | $python | $java | $2 | \`make $4\` | $result | $(($(date +%s) - began)) |" |
    tee -a "$table"
}

failed() { grep -q 'fails' "$table"; }

for release in $releases; do
  root=$folder/$release
  rm -rf "$root"
  mkdir -p "$folder/cache/debs" "$folder/cache/root" "$folder/cache/user"
  debootstrap --variant=minbase --cache-dir="$folder/cache/debs" "$release" "$root" \
    >"$folder/$release-debootstrap.log"
  mkdir -p "$root"/var/cache/fresh/{root,user} "$root/usr/local/share/ca-certificates"
  cp /etc/resolv.conf /etc/hosts "$root/etc/"
  cp /usr/local/share/ca-certificates/*.crt "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
  inside "$root" "apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -q -y $packages;
    useradd --create-home user" >"$folder/$release-packages.log" 2>&1
  chown --reference="$root/home/user" "$folder/cache/user"
  for home in /home/user /root; do
    git clone -q --no-hardlinks . "$root$home/penstock"
  done
  chown -R --reference="$root/home/user" "$root/home/user"
  for each in $who; do
    home=$([ "$each" = root ] && echo /root || echo "/home/$each")
    for command in $commands; do run "$release" "$each" "$home" "$command"; done
  done
  rm -rf "$root"
done
cat "$table"
! failed
