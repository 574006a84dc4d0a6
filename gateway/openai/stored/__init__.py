"""The routes of files, batches and usage, which need a database."""

from pdserve.gateway.openai.stored.late import LateParts
