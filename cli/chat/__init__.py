"""`pdserve chat`: a conversation in the terminal."""
