"""`pdserve report`: one file with what the operator of a broken system needs, without secrets."""
