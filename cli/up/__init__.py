"""`pdserve up`: a complete system on one machine, and the supervision of its processes."""
