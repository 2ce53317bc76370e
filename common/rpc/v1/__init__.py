"""Generated from ``proto/common/rpc/v1`` by ``make proto``; a test holds it to its source."""
