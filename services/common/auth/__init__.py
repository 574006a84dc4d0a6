"""Authentication between the processes of a cluster, by certificates or by a shared secret."""
