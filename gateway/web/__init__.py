"""The pages that the gateway serves: chat and fleet."""
