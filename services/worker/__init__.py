"""What prefill and decode workers have in common: process, registration with routers, reports."""
