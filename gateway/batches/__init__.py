"""Files and batches of OpenAI's API, kept in a database and run beside other requests."""
