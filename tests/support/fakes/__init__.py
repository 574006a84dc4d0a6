"""Stand-ins for what the code under test talks to: devices, routers, workers, servers."""
