"""`pdserve up`: runs a complete system on one machine, and supervises its processes."""
