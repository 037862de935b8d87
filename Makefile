# nixlkv: the two commands are `make demo` and `make test`. Everything they need is fetched into .deps/ first.

PREFIX ?= /usr/local
DESTDIR ?=
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
CARGO ?= cargo

DEPS := $(CURDIR)/.deps
export NIXLKV_NIXL_LIBRARY ?= $(DEPS)/nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
export LIBCLANG_PATH ?= $(DEPS)/libclang-dir
export BINDGEN_EXTRA_CLANG_ARGS ?= -I$(shell cc -print-file-name=include 2>/dev/null)

.PHONY: all demo test header lint install deps clean

all: deps
	$(CARGO) build --release --locked

deps:
	@.ci/fetch

demo: all
	$(MAKE) -C examples-c
	examples-c/build/demo

test: deps
	$(CARGO) test --locked --features fault-injection

header: deps
	NIXLKV_BLESS=1 $(CARGO) test --locked --features fault-injection --test header the_committed_header

lint: deps
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets --features fault-injection -- -D warnings

install: all
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(INCLUDEDIR)
	install -m 755 target/release/libnixlkv.so $(DESTDIR)$(LIBDIR)/libnixlkv.so.$(VERSION)
	ln -sfn libnixlkv.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libnixlkv.so.0
	ln -sfn libnixlkv.so.0 $(DESTDIR)$(LIBDIR)/libnixlkv.so
	install -m 644 target/release/libnixlkv.a $(DESTDIR)$(LIBDIR)/libnixlkv.a
	install -m 644 include/nixlkv.h $(DESTDIR)$(INCLUDEDIR)/nixlkv.h
	sed -e 's|@prefix@|$(PREFIX)|' -e 's|@libdir@|$(LIBDIR)|' -e 's|@includedir@|$(INCLUDEDIR)|' \
	    -e 's|@version@|$(VERSION)|' nixlkv.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/nixlkv.pc

clean:
	$(CARGO) clean
	rm -rf examples-c/build
