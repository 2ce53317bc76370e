"""The wire: frames, options, addresses, method tables. This package's root imports no gRPC."""

PROTOCOL_VERSION = 1
