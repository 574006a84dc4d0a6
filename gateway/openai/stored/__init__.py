"""The routes of files, batches and usage in OpenAI's API, which need a database."""

from pdserve.gateway.openai.stored.late import LateParts
