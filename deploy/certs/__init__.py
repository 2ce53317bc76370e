"""``byzuldp certs``: an authority, and certificates for the parameter server and its clients."""
