//! Property tests of the wire.
