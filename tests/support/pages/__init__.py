"""Drive the web pages in a browser, and serve them a model."""
