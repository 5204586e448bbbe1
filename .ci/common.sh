# What .ci/run and .ci/full share. They source it from the root of the repository.
# shellcheck shell=bash

# Steps, with the seconds that each takes.
steps=()
now=""
began=$SECONDS
step() {
  [ -z "$now" ] || steps+=("$(printf '%6d s  %s' $((SECONDS - began)) "$now")")
  now=$1 began=$SECONDS
  [ -z "$now" ] || printf '\n== %s (after %d s)\n' "$now" "$SECONDS"
}

# Where Python is, what is installed, and what tests find: the first step.
environment() {
  [ -x .venv/bin/python ] || python3 -m venv .venv
  .venv/bin/pip install --quiet -c constraints.txt -e '.[dev]'
  # Editable installs before 2026-11-27 leave empty folders of templates, which would hide flashgen.
  rm -rf .venv/lib/python3*/site-packages/flashgen
  export PATH="$PWD/.venv/bin:$PATH"
  # The tests of pages want a browser. Where none can be installed they are skipped, and that is
  # said: whether a change is good does not depend on whether an archive of packages answers. Only
  # what needs the network has a limit of time; an installation that is cut off would leave dpkg
  # broken.
  local apt=(apt-get -qq -o DPkg::Lock::Timeout=60 -o Acquire::Retries=2 -o Acquire::http::Timeout=30)
  local chromium=(install -y --no-install-recommends chromium chromium-driver)
  if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    export DEBIAN_FRONTEND=noninteractive
    { timeout 120 "${apt[@]}" update && timeout 300 "${apt[@]}" "${chromium[@]}" --download-only &&
      "${apt[@]}" "${chromium[@]}" --no-download; } >/dev/null || true
  fi
  command -v chromedriver >/dev/null || echo "no Chromium here: tests marked 'browser' are skipped"
  # A test process for each core; threads of their own would only wait for one another. (nproc
  # itself goes by OMP_NUM_THREADS.)
  in_parallel=(-n "$(env -u OMP_NUM_THREADS nproc)" --dist worksteal -q --durations=20)
  export OMP_NUM_THREADS=1
  # What flashgen builds for calls of tests, it builds once for all of their sessions.
  FLASHGEN_SHARED_TEST_CACHE=$(mktemp -d)
  export FLASHGEN_SHARED_TEST_CACHE
  # Bytecode of the tests and of flashgen is kept for the many processes that import them.
  unset PYTHONDONTWRITEBYTECODE
}

# Other Tritons than the one that is pinned, each in a folder that PYTHONPATH names.
other_tritons() {
  local version
  for version in "$@"; do
    [ -d ".venv/triton-$version" ] ||
      .venv/bin/pip install --quiet --no-deps --target ".venv/triton-$version" "triton==$version"
  done
}

# The oldest transformers and diffusers that work, with what they need that is older than what is
# installed, in a folder that PYTHONPATH names.
oldest_models=.venv/transformers-5.17.0
oldest_transformers() {
  [ -d $oldest_models ] ||
    .venv/bin/pip install --quiet --no-deps --target $oldest_models \
      transformers==5.17.0 diffusers==0.41.0 "huggingface-hub==1.33.0" httpx httpcore sniffio
}

# Lint and types beside the modules, which are checked by one process.
lint_types_and_modules() {
  flashgen check >"$checked" 2>&1 &
  local checking=$!
  ruff check .
  ruff format --check .
  mypy
  wait $checking || { cat "$checked"; return 1; }
  tail -n 1 "$checked"
}
checked=$(mktemp)
trap 'rm -rf "$checked" "${FLASHGEN_SHARED_TEST_CACHE:-}"' EXIT

# The seconds of all steps.
seconds_by_step() {
  step ""
  printf '\n%s\n' "seconds by step:"
  printf '%s\n' "${steps[@]}"
}
