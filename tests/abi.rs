//! The two languages see the same structs: sizes and offsets that a C compiler finds in the header are those of the
//! Rust types behind it. And they stay: a program that was built with an older header must find every field where it
//! was.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use nixlkv::ffi::*;

/// A field: its name, offset and size.
type Field = (&'static str, usize, usize);
/// A struct: its name, its size and its fields in order.
type Layout = (&'static str, usize, Vec<Field>);

fn field_size<S, T>(_: fn(&S) -> &T) -> usize {
    size_of::<T>()
}

macro_rules! layouts {
    ($($name:ident { $($field:ident),* $(,)? },)*) => {
        vec![$((
            stringify!($name),
            size_of::<$name>(),
            vec![$((stringify!($field), offset_of!($name, $field), field_size(|value: &$name| &value.$field))),*],
        )),*]
    };
}

#[rustfmt::skip]
fn rust_layouts() -> Vec<Layout> {
    layouts! {
        nixlkv_param_t { key, value },
        nixlkv_engine_config_t {
            struct_size, role, name, nixl_library, backend, backend_params, num_backend_params, cache_dtype,
            num_workers, queue_depth, max_rooms, log_level, log_callback, log_user_data, create_timeout_ms,
            connect_timeout_ms, grant_timeout_ms, room_timeout_ms, heartbeat_interval_ms, liveness_limit_ms,
            stall_timeout_ms,
        },
        nixlkv_nixl_info_t {
            struct_size, num_plugins, nixl_library, backend, plugins, backend_params, num_backend_params,
        },
        nixlkv_stats_t {
            struct_size, reserved, rooms_opened, rooms_succeeded, rooms_failed, rooms_active, rooms_unquiesced,
            chunks_pending, chunks_sent, bytes_sent, descriptors_sent, transfers_posted, transfers_in_flight,
            transfers_failed, messages_sent, messages_received, messages_malformed, messages_unknown_peer,
            messages_unknown_room, messages_stale, messages_duplicate, messages_dropped,
        },
        nixlkv_health_t {
            struct_size, reserved, oldest_transfer_ms, oldest_transfer_room, num_peers, num_peers_suspect,
            num_peers_silent, num_peers_lost, num_rooms_quarantined, num_pages_quarantined, num_grants_parked,
            num_connections_closing,
        },
        nixlkv_region_t {
            struct_size, kind, address, len, item_len, layer_id, part, group, memory_kind, device_id, flags,
            reserved,
        },
        nixlkv_state_indices_t { struct_size, group, indices, num_indices },
        nixlkv_recv_params_t {
            struct_size, reserved, room, senders, num_senders, pages, num_pages, aux_index, aux_sender, states,
            num_states, num_receivers, timeout_ms,
        },
        nixlkv_chunk_t { struct_size, flags, room, pages, num_pages, page_offset, aux_index, states, num_states },
        nixlkv_room_status_t {
            struct_size, state, error, quiesced, error_text, num_chunks, num_pages, num_bytes, num_descriptors,
            num_pending_chunks, num_pending_senders, suspect, reserved,
        },
    }
}

fn header() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/nixlkv.h");
    let mut rest = std::fs::read_to_string(path).unwrap();
    let mut text = String::new();
    while let Some((before, comment)) = rest.split_once("/*") {
        text.push_str(before);
        rest = comment.split_once("*/").unwrap().1.to_owned();
    }
    text + &rest
}

/// The structs of the header with the names of their fields.
fn header_structs() -> BTreeMap<String, Vec<String>> {
    let header = header();
    let mut found = BTreeMap::new();
    for part in header.split("typedef struct ").skip(1) {
        let Some((name, body)) = part.split_once(" {").filter(|(name, _)| !name.contains(';')) else { continue };
        let (body, _) = body.split_once('}').unwrap();
        let fields = body.split(';').map(str::trim).filter(|field| !field.is_empty());
        let names = fields.map(|field| field.rsplit([' ', '*']).next().unwrap().to_owned());
        found.insert(name.to_owned(), names.collect());
    }
    found
}

/// What a C compiler makes of the header.
fn c_layouts(layouts: &[Layout]) -> String {
    let mut source = String::from("#include <nixlkv.h>\n#include <stdio.h>\nint main(void) {\n");
    for (name, _, fields) in layouts {
        let _ = writeln!(source, "    printf(\"{name} %zu\\n\", sizeof({name}));");
        for (field, ..) in fields {
            let size = format!("sizeof ((({name} *)0)->{field})");
            let _ = writeln!(source, "    printf(\"{name}.{field} %zu %zu\\n\", offsetof({name}, {field}), {size});");
        }
    }
    source.push_str("    return 0;\n}\n");
    let dir = tempfile::tempdir().unwrap();
    let (file, program) = (dir.path().join("layouts.c"), dir.path().join("layouts"));
    std::fs::write(&file, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Werror", "-I"]).arg(include).arg(&file).arg("-o").arg(&program);
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_struct_and_field_of_the_header_is_compared() {
    let ours: BTreeMap<String, Vec<String>> = rust_layouts()
        .into_iter()
        .map(|(name, _, fields)| (name.to_owned(), fields.into_iter().map(|(field, ..)| field.to_owned()).collect()))
        .collect();
    assert_eq!(header_structs(), ours);
}

#[test]
fn c_and_rust_agree_on_sizes_and_offsets() {
    let layouts = rust_layouts();
    let mut expected = String::new();
    for (name, size, fields) in &layouts {
        let _ = writeln!(expected, "{name} {size}");
        for (field, offset, size) in fields {
            let _ = writeln!(expected, "{name}.{field} {offset} {size}");
        }
    }
    assert_eq!(c_layouts(&layouts), expected);
}

/// Fields follow each other without padding, so that no byte of a struct is left undefined, and struct_size leads.
#[test]
fn structs_have_no_padding_and_begin_with_their_size() {
    for (name, size, fields) in rust_layouts() {
        let mut end = 0;
        for (field, offset, len) in &fields {
            assert_eq!(*offset, end, "{name}.{field} does not follow what is before it");
            end += len;
        }
        assert_eq!(end, size, "{name} ends in padding");
        if name != "nixlkv_param_t" {
            assert_eq!(fields[0], ("struct_size", 0, 4), "{name}");
        }
    }
}

/// Sizes of version 1 of the binary interface where pointers have 64 bits. A struct may grow at its end: then its
/// first size goes on being accepted, and this list stays as it is.
#[cfg(target_pointer_width = "64")]
#[test]
fn i4_structs_only_grow() {
    let first = [
        ("nixlkv_param_t", "value", 8, 16),
        ("nixlkv_engine_config_t", "liveness_limit_ms", 128, 136),
        ("nixlkv_nixl_info_t", "num_backend_params", 40, 48),
        ("nixlkv_stats_t", "messages_duplicate", 152, 160),
        ("nixlkv_region_t", "reserved", 60, 64),
        ("nixlkv_state_indices_t", "num_indices", 16, 24),
        ("nixlkv_recv_params_t", "timeout_ms", 88, 96),
        ("nixlkv_chunk_t", "num_states", 56, 64),
        ("nixlkv_room_status_t", "num_pending_senders", 64, 72),
    ];
    assert_eq!(NIXLKV_ABI_VERSION, 1);
    for (name, last_field, offset, size) in first {
        let layouts = rust_layouts();
        let (_, now, fields) = layouts.iter().find(|(other, ..)| *other == name).unwrap();
        assert!(*now >= size, "{name} has shrunk from {size} to {now} bytes");
        assert!(
            fields.iter().any(|(field, at, _)| (*field, *at) == (last_field, offset)),
            "{name}.{last_field} is no longer at {offset}"
        );
    }
}
