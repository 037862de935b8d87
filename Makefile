# nixlkv: the two commands are `make demo` and `make test`. Everything they need is fetched into .deps/ first.

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DESTDIR ?=
CARGO ?= cargo
CC ?= cc
CXX ?= g++

DEPS := $(CURDIR)/.deps
TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
# What `install-built` installs.
BUILT ?= $(TARGET)/release
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
WARNINGS := -Wall -Wextra -Wpedantic -Werror

export NIXLKV_NIXL_LIBRARY ?= $(DEPS)/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
# For the bindings that nixl-sys generates: libclang, and the compiler's own headers, which libclang's wheel lacks.
export LIBCLANG_PATH ?= $(DEPS)/libclang-dir
export BINDGEN_EXTRA_CLANG_ARGS ?= -I$(shell $(CC) -print-file-name=include 2>/dev/null)

# Tests built for a sanitizer, in a folder of their own. The switches are open on a stable toolchain with RUSTC_BOOTSTRAP.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
SUPPRESSIONS := $(CURDIR)/tests/sanitizers
C_PROGRAMS := --locked --features fault-injection --test c_programs
SANITIZED = RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(2)" NIXLKV_TEST_UNDER=$(1) $(3) \
	$(CARGO) test $(C_PROGRAMS) --lib --no-fail-fast --target $(HOST) --target-dir $(TARGET)/$(1)
# Whatever has this in its name: make check-asan ONLY=api_
ONLY ?=

.PHONY: all demo test check-asan check-tsan check-valgrind chaos fuzz header lint install install-built deps clean

all: deps
	$(CARGO) build --release --locked

demo: all
	@$(MAKE) -s --no-print-directory -C examples-c NIXLKV=tree TARGET=$(TARGET)/release
	@examples-c/build/demo

# Everything, and the programs of single calls once more under AddressSanitizer and UBSan.
test: deps
	$(CARGO) test --locked --features fault-injection --no-fail-fast
	NIXLKV_TEST_UNDER=asan $(CARGO) test $(C_PROGRAMS) -- --skip flow_ --skip env_

# The C programs under AddressSanitizer, its leak checker and UBSan, the library built for it too; and the unit tests.
check-asan: deps
	$(call SANITIZED,asan,-Zsanitizer=address,LSAN_OPTIONS=suppressions=$(SUPPRESSIONS)/lsan.supp) $(ONLY)

# The same under ThreadSanitizer, with a standard library that it understands.
check-tsan: deps
	python3 tests/sanitizers/tsan_sysroot.py $(TARGET)/tsan/sysroot
	$(call SANITIZED,tsan,--sysroot=$(TARGET)/tsan/sysroot -Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer,\
	    TSAN_OPTIONS=suppressions=$(SUPPRESSIONS)/tsan.supp) $(ONLY)

# The C programs under valgrind's memcheck. Takes long.
check-valgrind: deps
	@command -v valgrind >/dev/null || \
	    { echo "nixlkv: valgrind is missing: install it (Debian: apt-get install valgrind)" >&2; exit 1; }
	NIXLKV_TEST_UNDER=valgrind $(CARGO) test $(C_PROGRAMS) $(ONLY)

# The soak under faults, for as long as you like: `make chaos SECONDS=3600 SEED=7`. Its last line is `violations: N`.
chaos: deps
	@NIXLKV_CHAOS_SECONDS=$(or $(SECONDS),120) NIXLKV_CHAOS_SEED=$(or $(SEED),1) \
	    $(CARGO) test -q --locked --features fault-injection --test chaos

# Every fuzz target for so many seconds, under AddressSanitizer; what it learns stays in fuzz/corpus, what it finds in
# fuzz/artifacts.
fuzz: deps
	@set -e; programs=$$(SANITIZER=address fuzz/build.sh); \
	for target in fuzz/fuzz_targets/*.rs; do \
	    target=$$(basename $$target .rs); mkdir -p fuzz/corpus/$$target fuzz/artifacts/$$target; \
	    echo "$$target"; \
	    $$programs/$$target -max_total_time=$(or $(SECONDS),60) -timeout=60 -rss_limit_mb=4096 -max_len=4096 \
	        -print_final_stats=1 -artifact_prefix=fuzz/artifacts/$$target/ fuzz/corpus/$$target fuzz/seeds/$$target; \
	done

header: deps
	NIXLKV_BLESS=1 $(CARGO) test --locked --features fault-injection --test header the_committed_header

lint: deps
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets --features fault-injection -- -D warnings
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CC) -std=c99 $(WARNINGS) -fsyntax-only -x c include/nixlkv.h
	$(CXX) -std=c++11 $(WARNINGS) -fsyntax-only -x c++ include/nixlkv.h

install: all install-built

install-built:
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR)
	install -m 755 $(BUILT)/libnixlkv.so $(DESTDIR)$(LIBDIR)/libnixlkv.so.$(VERSION)
	ln -sfn libnixlkv.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libnixlkv.so.0
	ln -sfn libnixlkv.so.0 $(DESTDIR)$(LIBDIR)/libnixlkv.so
	install -m 644 $(BUILT)/libnixlkv.a $(DESTDIR)$(LIBDIR)/libnixlkv.a
	install -m 644 include/nixlkv.h $(DESTDIR)$(INCLUDEDIR)/nixlkv.h
	sed -e 's|@prefix@|$(PREFIX)|' -e 's|@libdir@|$(LIBDIR)|' -e 's|@includedir@|$(INCLUDEDIR)|' \
	    -e 's|@version@|$(VERSION)|' nixlkv.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/nixlkv.pc

deps:
	@.ci/fetch

clean:
	$(CARGO) clean
	$(MAKE) -C examples-c NIXLKV=tree clean
