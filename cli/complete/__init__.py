"""`pdserve complete`: a file of requests, answered line by line."""
