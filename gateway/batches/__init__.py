"""Files and batches of OpenAI's API. The gateway keeps them in its database and runs the requests
of batches beside those of clients."""

from pdserve.gateway.batches.batches import Batches
from pdserve.gateway.batches.files import FileLimits, Files, Page, Stored
from pdserve.gateway.batches.run import LineResponse, LineSlots
from pdserve.gateway.batches.runner import BatchRunner
from pdserve.gateway.batches.tables import PIECE_BYTES, StoredBatch, StoredFile
