import os

# Otherwise gRPC logs what peers send as it came, escape sequences and all, a line for each. It reads this on import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
