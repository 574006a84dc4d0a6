"""What prefill and decode workers share: process, membership, reports."""
