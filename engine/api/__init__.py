"""What callers of the engine use: requests, events, options and bounds."""
