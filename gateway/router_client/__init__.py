"""The gateway's client of the router: sessions, and requests that survive a lost one."""
