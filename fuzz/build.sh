#!/bin/sh
# Builds the targets with cargo alone, with libFuzzer's coverage counters, as cargo-fuzz does with a nightly toolchain.
# Prints the folder that they are in. With SANITIZER=address also under AddressSanitizer, which rustc has, but asks for
# a nightly's flag.
set -eu
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions"
dir=target/fuzz
if [ "${SANITIZER:-}" = address ]; then
    RUSTFLAGS="$RUSTFLAGS -Zsanitizer=address"
    RUSTC_BOOTSTRAP=1
    export RUSTC_BOOTSTRAP
    dir=target/fuzz-address
fi
export RUSTFLAGS
unset CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_RUSTFLAGS CARGO_TARGET_DIR || true
# With --target the flags are the targets' only: build scripts and macros are built as ever.
${CARGO:-cargo} build --quiet --locked --release --manifest-path fuzz/Cargo.toml --bins \
    --target "$target" --target-dir "$dir" >&2
echo "$PWD/$dir/$target/release"
