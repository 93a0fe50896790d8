#!/bin/sh
# Says everything that this machine lacks for `make demo` or `make test`, before anything is
# installed. Root on Debian gets it installed in one go; others are told the line to run.
#
#   tools/needs.sh env|demo|test       PYTHON=python3.12 looks at another Python
#
# `env` is what every other command of the Makefile needs: Python with its virtual environments.
#
# Without Java, a browser or a pooler an ordinary user's tests run all the same, and those that
# need them are skipped; where CI=true they are needed, too.
set -eu
goal=$1
PYTHON=${PYTHON:-python3}
missing='' skipped='' required='' optional=''

need() { # what it is, and the packages of Debian that have it
  missing="$missing  $1
"
  required="$required $2"
}

want() {
  if [ "${CI:-}" = true ]; then
    need "$1" "$2"
  else
    skipped="$skipped  $1
"
    optional="$optional $2"
  fi
}

has() { command -v "$1" >/dev/null 2>&1; }

java_version() { # 17 of "17.0.15", nothing without Java
  java=${JAVA_HOME:+$JAVA_HOME/bin/}java
  has "$java" && "$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)*\([0-9]*\).*/\2/p' | head -n 1
}

# Debian 12 has 17, Debian 13 has 21; a list of packages that is not there yet names neither.
java_package() {
  for each in openjdk-17-jre-headless openjdk-21-jre-headless; do
    if LC_ALL=C apt-cache policy "$each" 2>/dev/null | grep -q 'Candidate: [0-9]'; then
      echo "$each"
      return
    fi
  done
  echo default-jre-headless
}

look() {
  missing='' skipped='' required='' optional=''
  if ! has "$PYTHON"; then
    need "Python 3.11 or newer ($PYTHON is not here)" python3-venv
  elif ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    need "Python 3.11 or newer ($PYTHON is $("$PYTHON" --version 2>&1); or set PYTHON=python3.x)" \
      python3-venv
  elif ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    need "Python's module venv with pip, for an environment in .venv" python3-venv
  fi
  [ "$goal" != env ] || return 0
  found=$(java_version) || found=''
  if [ -z "$found" ] || [ "$found" -lt 17 ]; then
    what="a Java runtime, 17 or 21: Spark runs on it${found:+ (here is Java $found)}"
    if [ "$goal" = demo ]; then
      need "$what" "$(java_package)"
    else
      want "$what" "$(java_package)"
    fi
  fi
  if [ "$goal" = test ]; then
    has chromium && has chromedriver ||
      want "Chromium: the console is tested in it" "chromium chromium-driver fonts-dejavu-core"
    has pgbouncer || [ -x /usr/sbin/pgbouncer ] ||
      want "PgBouncer: stores on SQL are tested behind it" pgbouncer
  fi
}

look
if [ -n "$required$optional" ] && [ "$(id -u)" = 0 ] && has apt-get; then
  printf 'This machine lacks, and apt-get now installs:\n%s%s' "$missing" "$skipped"
  apt-get update -q
  look
  # shellcheck disable=SC2086 # several packages
  DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends $required $optional
  # Debian starts the pooler as a service of the machine; tests start their own.
  case "$optional$required" in
    *pgbouncer*) [ ! -d /run/systemd/system ] || systemctl disable --now pgbouncer || true ;;
  esac
  look
fi
if [ -n "$required" ]; then
  printf '"make %s" needs what this machine lacks:\n%s' "$goal" "$missing$skipped"
  echo "On Debian, as root:  apt-get install$required$optional"
  exit 1
fi
if [ -n "$optional" ]; then
  printf 'This machine lacks what some tests need; they are skipped:\n%s' "$skipped"
  echo "On Debian, as root:  apt-get install$optional"
fi
if [ "$goal" = test ] && ! has npm; then
  echo "npm is not here: the tests with node's clients are skipped${CI:+, or fail on CI}."
fi
