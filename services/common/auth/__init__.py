"""How processes of a cluster authenticate: certificates or a shared secret."""
