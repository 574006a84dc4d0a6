"""One request in the router: its state machine, and the shell that carries its actions out."""
