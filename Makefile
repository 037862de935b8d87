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

.PHONY: all demo test chaos fuzz header lint install install-built deps clean

all: deps
	$(CARGO) build --release --locked

demo: all
	@$(MAKE) -s --no-print-directory -C examples-c NIXLKV=tree TARGET=$(TARGET)/release
	@examples-c/build/demo

test: deps
	$(CARGO) test --locked --features fault-injection --no-fail-fast

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
