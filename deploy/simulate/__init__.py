"""A run in one process: the clients' and adversaries' half is here, the server's own half is as over the network."""
